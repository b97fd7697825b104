"""Build this rank's uninitialised chunks of megatron-core's GPTModel from a transformers configuration.

Layers follow megatron-core's local specification with our attention and a norm that supports sequence parallelism, or
are Transformer Engine's with our attention; see `uses_transformer_engine`. `settings` defines the supported models.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlframework.config.policy import PolicyConfig
from rlframework.errors import ConfigError
from rlframework.interfaces.data_processor import Microbatch
from rlframework.models.attention import RowLayout, Segments
from rlframework.policy.head.logprobs import VocabularyShard
from rlframework.policy.head.patch import HeadPatch
from rlframework_megatron.attention import CoreAttention
from rlframework_megatron.config import MegatronConfig
from rlframework_megatron.coordinates import Coordinates
from rlframework_megatron.names import gives_scores, is_sparse, is_tied
from rlframework_megatron.parallel import Groups
from rlframework_megatron.recomputed_mlp import RecomputedMLP
from rlframework_megatron.settings import rotary_frequencies, transformer_config
from rlframework_megatron.upstream import (
    ColumnParallelLinear,
    GPTModel,
    ModuleSpec,
    RowParallelLinear,
    TransformerBlockSubmodules,
    TransformerConfig,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    set_tensor_model_parallel_attributes,
)


class RMSNorm(nn.Module):
    """RMSNorm of Llama and Qwen, computed in fp32; under sequence parallelism tensor ranks sum its gradient.

    Constructor arguments: those that megatron-core passes to norms.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self._recomputes = config.recompute_granularity == "selective"
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise `hidden [..., H]` over the last dimension."""
        if self._recomputes and torch.is_grad_enabled():
            normed: Tensor = checkpoint(self._normalise, hidden, use_reentrant=False, preserve_rng_state=False)
            return normed
        return self._normalise(hidden)

    def _normalise(self, hidden: Tensor) -> Tensor:
        if hidden.dtype == torch.float32:
            return nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        # rounded before the weight, as transformers does
        normed = nn.functional.rms_norm(hidden.float(), self.weight.shape, None, self.eps)
        return self.weight * normed.to(hidden.dtype)


class Head(HeadPatch):
    """Replaces the output layer's forward to return the head's values instead of logits; see `HeadPatch`."""

    def _forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> Tensor:
        """Return values `[N, ...]` at the positions of `computing` from `hidden [L, n, H]` and the local `weight`."""
        assert self.wanted is not None
        request, positions, targets = self.wanted
        length, rows, width = hidden.shape
        indices = positions % length * rows + positions // length  # megatron-core's layout: sequence first
        chosen = hidden.reshape(-1, width).index_select(0, indices)
        weight = self._head.weight if weight is None else weight
        return self.values(request, chosen, weight, None, targets)


class ScoreHead(nn.Module):
    """The head of a reward model, which replaces the output layer: one row, replicated on all tensor ranks."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))


class Chunk(GPTModel):  # type: ignore[misc]  # megatron-core carries no types
    """One model chunk of a pipeline stage. `head` is None except on the last chunk of the model."""

    def __init__(
        self,
        *,
        frequencies: Tensor,
        vocabulary: int,
        pad: int | None,
        groups: Groups,
        scores: bool = False,
        **arguments: Any,
    ) -> None:
        """Other arguments: those of GPTModel.

        `frequencies [D / 2]`: rotary frequencies; `vocabulary`: number of tokens without padding; `pad`: the token
        whose input embedding gets no gradient, as in transformers (None: no such token); `scores`: use a score head.
        """
        super().__init__(position_embedding_type="none", **arguments)
        self._frequencies, self._pad, self._groups = frequencies, pad, groups
        self.head: Head | None = None
        if self.post_process and scores:
            self.output_layer = ScoreHead(self.config.hidden_size, self.config.params_dtype)
            self.head = Head(self)
        elif self.post_process:
            self.head = Head(self, _vocabulary_shard(vocabulary, arguments["vocab_size"], groups))

    def get_output_embeddings(self) -> nn.Module:
        """The output layer, under its transformers name."""
        found: nn.Module = self.output_layer
        return found

    def forward(self, input_ids: Tensor, position_ids: Tensor, row: RowLayout | None = None) -> Tensor:
        """Return the input of the next stage or, on the last stage, the head's values.

        `input_ids [n, L]` is embedded on the first stage; later stages use the output of the previous one.
        `position_ids [n, L]`: identical in all rows. `row`: see `CoreAttention`.
        """
        hidden = self._embedded(input_ids) if self.pre_process else None
        self._frequencies = self._frequencies.to(input_ids.device)
        angles = torch.outer(position_ids[0].float(), self._frequencies)
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.cat((angles, angles), -1)[:, None, None],
            attention_bias=row,
        )
        found: Tensor = hidden
        if not self.post_process:
            return found
        if self.config.sequence_parallel:
            # each rank has the whole gradient of the head's input, so it keeps only its shard
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        values: Tensor = self.output_layer(hidden, weight=weight)
        return values

    def _embedded(self, input_ids: Tensor) -> Tensor:
        """Embed `input_ids [n, L]` as `[L, n, H]`; under sequence parallelism, this rank's shard."""
        hidden: Tensor = self.embedding(input_ids=input_ids, position_ids=None)
        if self._pad is None:
            return hidden
        is_pad = (input_ids == self._pad).T.contiguous()  # pipeline stages send tensors in this memory layout
        if self.config.sequence_parallel:
            is_pad = is_pad.chunk(self._groups.sizes.tensor)[self._groups.tensor_rank]
        return torch.where(is_pad[..., None], hidden.detach(), hidden)


def _vocabulary_shard(vocabulary: int, padded: int, groups: Groups) -> VocabularyShard | None:
    """The local rows of the head; None if all are local. Rows beyond the vocabulary are padding."""
    if groups.tensor is None:
        return None
    share = padded // groups.sizes.tensor
    start = min(groups.tensor_rank * share, vocabulary)
    return VocabularyShard(groups.tensor, start, min(share, vocabulary - start))


def build_chunks(
    model_config: Any, config: PolicyConfig, section: MegatronConfig, groups: Groups, coordinates: Coordinates
) -> list[Chunk]:
    """Build this rank's chunks (one without interleaving) on the CPU or the current GPU, without initial values."""
    core_config = transformer_config(
        model_config, config, section, groups.sizes, groups.device, grouped=coordinates.fused
    )
    last = groups.sizes.pipeline - 1
    found = []
    for number in range(section.virtual_pipeline):
        first_here = groups.pipeline_rank == 0 and number == 0
        last_here = groups.pipeline_rank == last and number == section.virtual_pipeline - 1
        found.append(
            Chunk(
                config=core_config,
                transformer_layer_spec=_block(model_config, core_config, coordinates, number),
                vocab_size=coordinates.vocabulary(model_config.vocab_size),
                max_sequence_length=model_config.max_position_embeddings,
                pre_process=first_here,
                post_process=last_here,
                share_embeddings_and_output_weights=is_tied(model_config),
                vp_stage=number if section.virtual_pipeline > 1 else None,
                frequencies=rotary_frequencies(model_config),
                vocabulary=model_config.vocab_size,
                pad=model_config.pad_token_id,
                groups=groups,
                scores=gives_scores(model_config),
            )
        )
    for chunk in found:
        _mark_split(chunk.to(groups.device))  # megatron-core creates some of it on the CPU
    return found


def _mark_split(chunk: Chunk) -> None:
    """Mark parameters sharded across tensor ranks, for the gradient norm.

    Megatron-core does this during weight initialisation, which is skipped.
    """
    for module in chunk.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)):
            rows = not isinstance(module, RowParallelLinear)
            for name, parameter in module.named_parameters(recurse=False):
                if not hasattr(parameter, "tensor_model_parallel") and (rows or name == "weight"):
                    set_tensor_model_parallel_attributes(parameter, True, 0 if rows else 1, 1)


def uses_transformer_engine(section: MegatronConfig, device: torch.device) -> bool:
    """Whether to use Transformer Engine's layers; raise `ConfigError` if they are requested but unavailable."""
    wanted, installed = section.transformer_engine, find_spec("transformer_engine") is not None
    if wanted == "auto":
        return installed and device.type == "cuda"
    if wanted == "true" and not (installed and device.type == "cuda"):
        raise ConfigError(
            f"policy.megatron.transformer_engine=true requires a GPU and the package transformer_engine; the device is "
            f"{device.type} and the package is {'installed' if installed else 'not installed'}. Set it to auto"
        )
    return wanted == "true"


def _fused_layer_spec(core_config: TransformerConfig, experts: int | None) -> ModuleSpec:
    """Transformer Engine's layer; norms that it does not fuse are ours."""
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=core_config.qk_layernorm
    )
    if experts is not None:
        spec.submodules.pre_mlp_layernorm = RMSNorm
    return spec


def _layer_spec(core_config: TransformerConfig, *, sparse: bool, fused: bool) -> ModuleSpec:
    """A layer with our attention and norms. `sparse`: with experts; `fused`: Transformer Engine's."""
    experts = core_config.num_moe_experts if sparse else None
    spec = _fused_layer_spec(core_config, experts) if fused else _local_layer_spec(core_config, experts)
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = CoreAttention
    if core_config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if not sparse:
        mlp = spec.submodules.mlp
        mlp.params = {**mlp.params, "ffn_hidden_size": core_config.ffn_hidden_size}
        if core_config.recompute_granularity == "selective":
            # not a ModuleSpec, for which megatron-core warns of classes that it does not know
            parts = {"params": mlp.params, "submodules": mlp.submodules}
            spec.submodules.mlp = SimpleNamespace(module=RecomputedMLP, **parts)
    return spec


def _local_layer_spec(core_config: TransformerConfig, experts: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=core_config.qk_layernorm, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    return spec


def _block(
    model_config: Any, core_config: TransformerConfig, coordinates: Coordinates, chunk: int
) -> TransformerBlockSubmodules:
    """The layers of one chunk and the final norm."""
    starts = coordinates.first_layers(model_config.num_hidden_layers)
    virtual_stage = chunk * coordinates.pipeline_size + coordinates.pipeline_rank
    layers = range(starts[virtual_stage], starts[virtual_stage + 1])
    specs = [
        _layer_spec(core_config, sparse=is_sparse(model_config, layer), fused=coordinates.fused) for layer in layers
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def model_inputs(microbatch: Microbatch) -> dict[str, Any]:
    """The arguments of `Chunk.forward` for a microbatch that is not split along the sequence."""
    inputs, bounds = microbatch.processed_inputs, microbatch.cu_seqlens
    return {
        "input_ids": inputs.input_ids,
        "position_ids": inputs.position_ids,
        "row": None if bounds is None else Segments(bounds.tolist()),
    }

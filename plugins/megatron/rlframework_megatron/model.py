"""From a configuration of transformers to this rank's chunks of megatron-core's GPTModel, empty.

The layers are those of megatron-core's local specification, with a norm of ours, which knows sequence parallelism, and
our attention; or those of Transformer Engine with our attention, see `uses_transformer_engine`. Which models there are
is told by `settings`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.config.policy import PolicyConfig
from rlframework.errors import ConfigError
from rlframework.interfaces.data_processor import Microbatch
from rlframework.models.attention import Segments
from rlframework.models.context_parallel import Share
from rlframework.policy.head.patch import HeadPatch
from rlframework.policy.head.vocab_parallel import VocabularyShard
from rlframework_megatron.attention import CoreAttention
from rlframework_megatron.config import MegatronConfig
from rlframework_megatron.coordinates import Place
from rlframework_megatron.names import gives_scores, is_sparse, is_tied
from rlframework_megatron.parallel import Groups
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
    """The norm of Llama and Qwen, computed in fp32; with sequence parallelism its gradient is summed over tensor ranks.

    Arguments: as megatron-core makes norms.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., H]`, normalised over the last dimension."""
        if hidden.dtype == torch.float32:
            return nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        # rounded before the weight, as transformers does
        normed = nn.functional.rms_norm(hidden.float(), self.weight.shape, None, self.eps)
        return self.weight * normed.to(hidden.dtype)


class Head(HeadPatch):
    """What replaces the forward of the output layer: the head's values instead of logits, see `HeadPatch`."""

    def _forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> Tensor:
        """`hidden [L, n, H]`, `weight` of this rank; values `[N, ...]` at the positions of `computing`."""
        assert self._request is not None
        assert self._positions is not None
        assert self._targets is not None
        length, rows, width = hidden.shape
        places = self._positions % length * rows + self._positions // length  # the sequence is the first dimension here
        chosen = hidden.reshape(-1, width).index_select(0, places)
        weight = self._head.weight if weight is None else weight
        return self._values(self._request, chosen, weight, None, self._targets)


class ScoreHead(nn.Module):
    """The head of a reward model, in the place of the output layer: one row, which all tensor ranks have."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))


class Chunk(GPTModel):  # type: ignore[misc]  # megatron-core carries no types
    """The part of a model on one stage of the pipeline, or one of its parts there. `head` is None but on the last."""

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
        """`frequencies [D / 2]` of rotary positions; `vocabulary`: tokens without padding; `scores`: the head gives
        these; others: GPTModel's.

        `pad`: the token whose embedding learns nothing where it is read, as transformers has it; None: there is none.
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
        """The output layer, by the name that transformers has for it."""
        found: nn.Module = self.output_layer
        return found

    def forward(self, input_ids: Tensor, position_ids: Tensor, row: Segments | Share | None = None) -> Tensor:
        """Of `input_ids [n, L]`, or of what the stage before sent: what the next stage gets, or the head's values.

        `position_ids [n, L]`: the same in all rows. `row`: see `CoreAttention`.
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
            # the gradient of the head's input is whole on each rank, so that each takes its part of it
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        values: Tensor = self.output_layer(hidden, weight=weight)
        return values

    def _embedded(self, input_ids: Tensor) -> Tensor:
        """`[L, n, H]` of `input_ids [n, L]`; with sequence parallelism this rank's part of them."""
        hidden: Tensor = self.embedding(input_ids=input_ids, position_ids=None)
        if self._pad is None:
            return hidden
        is_pad = (input_ids == self._pad).T.contiguous()  # stages send what lies in memory as this does
        if self.config.sequence_parallel:
            is_pad = is_pad.chunk(self._groups.sizes.tensor)[self._groups.tensor_rank]
        return torch.where(is_pad[..., None], hidden.detach(), hidden)


def _vocabulary_shard(vocabulary: int, padded: int, groups: Groups) -> VocabularyShard | None:
    """Which rows of the head are here; None where all are. Rows beyond the vocabulary are padding."""
    if groups.tensor is None:
        return None
    share = padded // groups.sizes.tensor
    start = min(groups.tensor_rank * share, vocabulary)
    return VocabularyShard(groups.tensor, start, min(share, vocabulary - start))


def build_chunks(
    model_config: Any, config: PolicyConfig, section: MegatronConfig, groups: Groups, place: Place
) -> list[Chunk]:
    """This rank's chunks, on the CPU or the GPU that is current, without values; one without interleaving."""
    made = transformer_config(model_config, config, groups.sizes, groups.device, grouped=place.fused)
    last = groups.sizes.pipeline - 1
    found = []
    for number in range(section.virtual_pipeline):
        first_here = groups.pipeline_rank == 0 and number == 0
        last_here = groups.pipeline_rank == last and number == section.virtual_pipeline - 1
        found.append(
            Chunk(
                config=made,
                transformer_layer_spec=_block(model_config, made, place, number),
                vocab_size=place.vocabulary(model_config.vocab_size),
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
        _mark_split(chunk.to(groups.device))  # megatron-core makes a part of it on the CPU
    return found


def _mark_split(chunk: Chunk) -> None:
    """Mark parameters that tensor ranks have parts of, for the norm of the gradient.

    Megatron-core does it where it draws first values, which is left out here.
    """
    for module in chunk.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)):
            rows = not isinstance(module, RowParallelLinear)
            for name, parameter in module.named_parameters(recurse=False):
                if not hasattr(parameter, "tensor_model_parallel") and (rows or name == "weight"):
                    set_tensor_model_parallel_attributes(parameter, True, 0 if rows else 1, 1)


def uses_transformer_engine(section: MegatronConfig, device: torch.device) -> bool:
    """Whether layers are Transformer Engine's; a `ConfigError` where they are asked for and cannot be."""
    wanted, there = section.transformer_engine, find_spec("transformer_engine") is not None
    if wanted == "auto":
        return there and device.type == "cuda"
    if wanted == "true" and not (there and device.type == "cuda"):
        raise ConfigError(
            f"policy.megatron.transformer_engine=true takes a GPU and the package transformer_engine; the device is "
            f"{device.type}, and the package is {'there' if there else 'not installed'}. Set it to auto"
        )
    return wanted == "true"


def _fused_layer_spec(made: TransformerConfig, experts: int | None) -> ModuleSpec:
    """Transformer Engine's layer with our attention, and our norms where they are not fused."""
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=made.qk_layernorm
    )
    if experts is not None:
        spec.submodules.pre_mlp_layernorm = RMSNorm
    return spec


def _layer_spec(made: TransformerConfig, *, sparse: bool, fused: bool) -> ModuleSpec:
    """Megatron-core's layer with our attention and our norms; `sparse`: with experts; `fused`: Transformer Engine's."""
    experts = made.num_moe_experts if sparse else None
    spec = _fused_layer_spec(made, experts) if fused else _local_layer_spec(made, experts)
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = CoreAttention
    if made.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if not sparse:
        spec.submodules.mlp.params = {**spec.submodules.mlp.params, "ffn_hidden_size": made.ffn_hidden_size}
    return spec


def _local_layer_spec(made: TransformerConfig, experts: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=made.qk_layernorm, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    return spec


def _block(model_config: Any, made: TransformerConfig, place: Place, chunk: int) -> TransformerBlockSubmodules:
    """The layers of one chunk, and the norm that ends the last one."""
    starts = place.first_layers(model_config.num_hidden_layers)
    piece = chunk * place.pipeline_size + place.pipeline_rank
    layers = range(starts[piece], starts[piece + 1])
    specs = [_layer_spec(made, sparse=is_sparse(model_config, layer), fused=place.fused) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def model_inputs(microbatch: Microbatch) -> dict[str, Any]:
    """What `Chunk.forward` takes of a microbatch that no ranks share along the sequence."""
    inputs, bounds = microbatch.processed_inputs, microbatch.cu_seqlens
    return {
        "input_ids": inputs.input_ids,
        "position_ids": inputs.position_ids,
        "row": None if bounds is None else Segments(bounds.tolist()),
    }

"""Build this rank's uninitialised chunks of megatron-core's GPTModel from a transformers configuration.

`layers` has the layers, `architectures` the supported models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlframework.config.policy import PolicyConfig
from rlframework.engine import (
    HeadPatch,
    Microbatch,
    PaddedRows,
    RowLayout,
    Segments,
    VocabularyShard,
    positions_without_padding,
)
from rlframework_megatron.architectures import architecture
from rlframework_megatron.config import MegatronConfig
from rlframework_megatron.coordinates import Coordinates
from rlframework_megatron.core_attention import LayerInputs, Rotary
from rlframework_megatron.layers import block
from rlframework_megatron.names import gives_scores, is_tied
from rlframework_megatron.parallel import Groups
from rlframework_megatron.settings import embedding_scale, transformer_config
from rlframework_megatron.upstream import (
    ColumnParallelLinear,
    GPTModel,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)


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
    """The head of a reward or value model, which replaces the output layer: one row, replicated on all tensor ranks."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))


class Chunk(GPTModel):  # type: ignore[misc]  # megatron-core carries no types
    """One model chunk of a pipeline stage. `head` is None except on the last chunk of the model."""

    def __init__(
        self,
        *,
        rotary: Rotary,
        embedding_scale: float,
        formula: dict[str, float],
        vocabulary: int,
        pad: int | None,
        groups: Groups,
        scores: bool = False,
        **arguments: Any,
    ) -> None:
        """Other arguments: those of GPTModel.

        `embedding_scale`: the factor of embeddings; `formula`: the settings of `LogitFormula`, by name; `vocabulary`:
        number of tokens without padding; `pad`: the token whose input embedding gets no gradient, as in transformers
        (None: no such token); `scores`: use a score head.
        """
        super().__init__(position_embedding_type="none", **arguments)
        self.rotary, self._embedding_scale, self._pad, self._groups = rotary, embedding_scale, pad, groups
        for name, value in formula.items():
            setattr(self, name, value)
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
        `position_ids [n, L]`: identical in all rows, unless `rotary.by_length`. `row`: the rows' layout; None: padded.
        """
        hidden = self._embedded(input_ids) if self.pre_process else None
        rotations = self.rotary.rotations(position_ids, self.config.params_dtype)
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            attention_bias=LayerInputs(PaddedRows() if row is None else row, rotations),
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
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
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
    rotary, formula = Rotary(model_config), architecture(model_config).formula
    found = []
    for number in range(section.virtual_pipeline):
        first_here = groups.pipeline_rank == 0 and number == 0
        last_here = groups.pipeline_rank == last and number == section.virtual_pipeline - 1
        found.append(
            Chunk(
                config=core_config,
                transformer_layer_spec=block(model_config, core_config, coordinates, number, rotary),
                vocab_size=coordinates.vocabulary(model_config.vocab_size),
                max_sequence_length=model_config.max_position_embeddings,
                pre_process=first_here,
                post_process=last_here,
                share_embeddings_and_output_weights=is_tied(model_config),
                vp_stage=number if section.virtual_pipeline > 1 else None,
                rotary=rotary,
                embedding_scale=embedding_scale(model_config, core_config.params_dtype),
                formula={key: value for key in formula if (value := getattr(model_config, key)) is not None},
                vocabulary=model_config.vocab_size,
                pad=_pad(model_config),
                groups=groups,
                scores=gives_scores(model_config),
            )
        )
    for chunk in found:
        _mark_split(chunk.to(groups.device))  # megatron-core creates some of it on the CPU
    return found


def _pad(model_config: Any) -> int | None:
    """The token whose embedding gets no gradient; torch counts a negative one from the end of the vocabulary."""
    pad: int | None = model_config.pad_token_id
    return pad if pad is None else pad % int(model_config.vocab_size)


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


def model_inputs(microbatch: Microbatch, *, by_length: bool = False) -> dict[str, Any]:
    """The arguments of `Chunk.forward` for a microbatch that is not split along the sequence.

    `by_length`: whether the rotary embeddings of a row depend on its length; see `Rotary.by_length`.
    """
    inputs, bounds = microbatch.processed_inputs, microbatch.cu_seqlens
    positions = inputs.position_ids
    if by_length and bounds is None:
        assert positions is not None
        positions = positions_without_padding(positions, microbatch.data_dict["input_lengths"])
    row = None if bounds is None else Segments(bounds.tolist())
    return {"input_ids": inputs.input_ids, "position_ids": positions, "row": row}

"""Rotary embeddings whose frequencies depend on the length of a sequence, computed for each sequence of a batch.

transformers takes one length for all rows of a forward, that of the longest, so the log-probabilities of a row would
depend on the rows beside it. Two kinds of embeddings do so:

- `longrope` (Ding et al. 2024, arXiv:2402.13753) has two sets of frequencies, for sequences up to the original maximum
  length of the model and for longer ones. Both are computed, and each token takes those of its sequence.
- `dynamic` (NTK-aware scaling) stretches the frequencies of a sequence that is longer than the model's maximum by its
  own length. Such sequences are computed one by one, which waits for the device in each forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LENGTH_DEPENDENT = {"dynamic", "longrope"}


def length_dependent(config: Any) -> set[str]:
    """Return the types of the rotary embeddings of a model of `config` whose frequencies depend on the length."""
    return {str(part.get("rope_type")) for part in _parts(config)} & LENGTH_DEPENDENT


def regime_limits(config: Any) -> list[int]:
    """Return the lengths, ascending, beyond which a model of `config` computes all tokens of a row in another way."""
    parts = [part for part in _parts(config) if part.get("rope_type") == "longrope"]
    return sorted({int(part["original_max_position_embeddings"]) for part in parts})


def _parts(config: Any) -> list[dict[str, Any]]:
    """The settings of the rotary embeddings: one, or one per layer type."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [part for part in (rope, *rope.values()) if isinstance(part, dict)]


def positions_without_padding(position_ids: Tensor, lengths: Tensor) -> Tensor:
    """Return `position_ids [n, L]` of padded rows with 0 in the padding; `lengths [b]` are of the first b rows."""
    positions = position_ids.clone()
    positions[: len(lengths)] *= position_ids[: len(lengths)] < lengths[:, None]
    return positions


def sequence_lengths(position_ids: Tensor) -> Tensor:
    """Return the length of each token's sequence, `[n, L]` like `position_ids`, which are 0 where a sequence starts."""
    sequence = ((position_ids == 0).cumsum(1) - 1).clamp(min=0)
    lengths = torch.zeros_like(position_ids).scatter_reduce(1, sequence, position_ids + 1, "amax")
    return lengths.gather(1, sequence)


@contextmanager
def lengths_given(model: nn.Module, lengths: Tensor) -> Iterator[None]:
    """Context manager: rows in forwards are parts of sequences; `lengths [n, L]` of the whole one of each token."""
    rotaries = [module.forward for module in model.modules() if isinstance(module.forward, SequenceRotary)]
    for rotary in rotaries:
        rotary.lengths = lengths
    try:
        yield
    finally:
        for rotary in rotaries:
            rotary.lengths = None


def rotate_by_sequence(model: nn.Module) -> None:
    """Make the length-dependent rotary embeddings of `model` depend on each sequence's own length.

    The sequences are those of the `position_ids` of a forward, in which padding has position 0.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if LENGTH_DEPENDENT & set(kinds.values() if isinstance(kinds, dict) else (kinds,)):
            module.forward = SequenceRotary(module)


class SequenceRotary:
    """The forward of a rotary module with frequencies for each sequence; `module`'s class computes sine and cosine.

    `lengths [n, L]`: the length of each token's sequence, None where the positions of a forward show it.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.lengths: Tensor | None = None
        self._compute: Any = type(module).forward
        while hasattr(self._compute, "__wrapped__"):  # without transformers' choice of one length
            self._compute = self._compute.__wrapped__

    @torch.no_grad()
    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return the module's output, cosine and sine `[n, L, ...]`, for `position_ids [n, L]`."""
        kind = self._module.rope_type if layer_type is None else self._module.rope_type[layer_type]
        if kind == "longrope":
            return self._two_regimes(x, position_ids, layer_type)
        if kind == "dynamic":
            return self._stretched(x, position_ids, layer_type)
        return self._with_length(x, position_ids, layer_type, None)

    def _lengths(self, position_ids: Tensor) -> Tensor:
        return sequence_lengths(position_ids) if self.lengths is None else self.lengths

    def _two_regimes(self, x: Tensor, position_ids: Tensor, layer_type: str | None) -> Any:
        limit = self._settings(layer_type)["original_max_position_embeddings"]
        is_long = self._lengths(position_ids) > limit
        short, long = (self._with_length(x, position_ids, layer_type, length) for length in (limit, limit + 1))
        return tuple(torch.where(_like(is_long, a), b, a) for a, b in zip(short, long, strict=True))

    def _stretched(self, x: Tensor, position_ids: Tensor, layer_type: str | None) -> Any:
        limit = self._module.config.max_position_embeddings
        lengths = self._lengths(position_ids)
        values = self._with_length(x, position_ids, layer_type, limit)
        for length in lengths[lengths > limit].unique().tolist():
            of_length = self._with_length(x, position_ids, layer_type, length)
            values = tuple(
                torch.where(_like(lengths == length, a), b, a) for a, b in zip(values, of_length, strict=True)
            )
        return values

    def _with_length(self, x: Tensor, position_ids: Tensor, layer_type: str | None, length: int | None) -> Any:
        """The module's output with the frequencies of sequences of `length` (None: those it has)."""
        keys = {} if layer_type is None else {"layer_type": layer_type}
        if length is not None:
            kind = self._module.rope_type if layer_type is None else self._module.rope_type[layer_type]
            frequencies, _ = ROPE_INIT_FUNCTIONS[kind](self._module.config, x.device, seq_len=length, **keys)
            getattr(self._module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq").copy_(frequencies)
        return self._compute(self._module, x, position_ids, **keys)

    def _settings(self, layer_type: str | None) -> Any:
        settings = self._module.config.rope_parameters
        return settings if layer_type is None else settings[layer_type]


def _like(mask: Tensor, values: Tensor) -> Tensor:
    """`mask [n, L]` with trailing axes as in `values [n, L, ...]`."""
    return mask.view(*mask.shape, *(1,) * (values.ndim - 2))

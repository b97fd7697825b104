"""Forwards of a decoding loop: of prompts padded on the left, of prompts of equal length, or of whole rows.

Padding on the left needs fewest batches, but only some models compute the same with it: others count positions from the
padding on, or have it in their state. Prompts of equal length need no padding, now or later, because each step appends
a token to each row. Whole rows need no cache either: a forward of all tokens for each new one, as the trainer runs it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rlframework.generation.attention import decoding_attention
from rlframework.generation.cache import decoding_cache
from rlframework.generation.head import logits_in_fp32


class RowForward(ABC):
    """The model with what it keeps of a batch of rows. Each distinct prompt is computed once."""

    equal_lengths: ClassVar[bool] = True
    """Whether the prompts of a batch must have equal lengths."""

    def __init__(self, model: Any, prompts: Sequence[Tensor], pad_id: int, longest: int, device: torch.device) -> None:
        """`prompts`: 1-D int64 on the CPU; each row gets at most `longest` new tokens."""
        self._model, self._device = model, device
        self._accepted = set(inspect.signature(model.forward).parameters)
        distinct: dict[tuple[int, ...], int] = {}
        numbers = [distinct.setdefault(tuple(prompt.tolist()), len(distinct)) for prompt in prompts]
        self._prompt_of = torch.tensor(numbers).to(device)
        ids = [torch.tensor(prompt) for prompt in distinct]
        self._prompt_lengths = [len(prompt) for prompt in distinct]
        self._ids = pad_sequence(ids, batch_first=True, padding_value=pad_id, padding_side="left").to(device)

    def prefill(self) -> Tensor:
        """Return the logits `[n, V]` after the prompts."""
        logits = self._first()
        if len(self._ids) < len(self._prompt_of):
            logits = logits[self._prompt_of]
            self.keep(self._prompt_of)
        return logits

    @abstractmethod
    def _first(self) -> Tensor:
        """Return the logits `[d, V]` after the distinct prompts."""

    @abstractmethod
    def advance(self, tokens: Tensor) -> Tensor:
        """Append a token to each row, `[n]`; return the next logits `[n, V]`."""

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Continue with `rows [m]` only; a row may be repeated."""

    def _call(self, ids: Tensor, **inputs: Any) -> Tensor:
        if "logits_to_keep" in self._accepted:
            inputs["logits_to_keep"] = 1
        with decoding_attention(self._model.config, ids.device), logits_in_fp32(self._model, ids.device):
            logits: Tensor = self._model(input_ids=ids, **inputs).logits[:, -1]
        return logits


class PaddedRows(RowForward):
    """Prompts padded on the left, with an attention mask, positions and a cache."""

    equal_lengths = False

    def __init__(self, model: Any, prompts: Sequence[Tensor], pad_id: int, longest: int, device: torch.device) -> None:
        super().__init__(model, prompts, pad_id, longest, device)
        masks = [torch.ones(length, dtype=torch.int64) for length in self._prompt_lengths]
        mask = pad_sequence(masks, batch_first=True, padding_side="left")
        self._width = mask.shape[1]
        self._padded = not bool(mask.all())
        self._mask = nn.functional.pad(mask, (0, longest), value=1).to(device)
        self._lengths = mask.sum(-1).to(device)
        self._cache = _cache(model, device, self._width + longest)

    def _first(self) -> Tensor:
        return self._cached(self._ids, (self._mask[:, : self._width].cumsum(-1) - 1).clamp_(min=0))

    def advance(self, tokens: Tensor) -> Tensor:
        """See `RowForward.advance`."""
        positions = self._lengths[:, None]
        self._lengths, self._width = self._lengths + 1, self._width + 1
        return self._cached(tokens[:, None], positions)

    def keep(self, rows: Tensor) -> None:
        """See `RowForward.keep`."""
        self._cache.reorder_cache(rows)
        self._mask, self._lengths = self._mask[rows], self._lengths[rows]

    def _cached(self, ids: Tensor, positions: Tensor) -> Tensor:
        inputs = {"position_ids": positions} if "position_ids" in self._accepted else {}
        mask = self._mask[:, : self._width] if self._padded else None
        return self._call(ids, attention_mask=mask, past_key_values=self._cache, use_cache=True, **inputs)


class EqualRows(RowForward):
    """Prompts of equal length with a cache, from which the model finds positions and attention masks itself."""

    def __init__(self, model: Any, prompts: Sequence[Tensor], pad_id: int, longest: int, device: torch.device) -> None:
        super().__init__(model, prompts, pad_id, longest, device)
        self._cache = _cache(model, device, self._ids.shape[1] + longest)
        self._name = next((name for name in _CACHES if name in self._accepted), _CACHES[0])

    def _first(self) -> Tensor:
        return self._call(self._ids, use_cache=True, **{self._name: self._cache})

    def advance(self, tokens: Tensor) -> Tensor:
        """See `RowForward.advance`."""
        return self._call(tokens[:, None], use_cache=True, **{self._name: self._cache})

    def keep(self, rows: Tensor) -> None:
        """See `RowForward.keep`."""
        self._cache.reorder_cache(rows)


class WholeRows(RowForward):
    """Prompts of equal length without a cache: each forward computes the whole rows."""

    def _first(self) -> Tensor:
        return self._call(self._ids, use_cache=False)

    def advance(self, tokens: Tensor) -> Tensor:
        """See `RowForward.advance`."""
        self._ids = torch.cat((self._ids, tokens[:, None]), 1)
        return self._call(self._ids, use_cache=False)

    def keep(self, rows: Tensor) -> None:
        """See `RowForward.keep`."""
        self._ids = self._ids[rows]


_CACHES = "past_key_values", "cache_params"
"""Names of the argument that takes a cache."""


def _cache(model: Any, device: torch.device, capacity: int) -> Any:
    """An empty cache; on a GPU memory is planned for the longest rows, a CPU's grows with those that there are."""
    return decoding_cache(model.config, None if device.type == "cpu" else capacity)

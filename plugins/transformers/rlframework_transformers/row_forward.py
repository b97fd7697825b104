"""Forwards of the decoding loop: of packed rows, of rows padded on the left, of rows of equal length, or of whole rows.

Packed rows (`packed_rows.py`) need neither padding nor masks, but only models whose tokens see others in nothing but
attention compute the same with them. Padding on the left suits some more; others count positions from the padding on,
or have it in their state. Rows of equal length need no padding, now or later, because each step appends a token to each
row. Whole rows need no cache either: a forward of all tokens for each new one, as the trainer runs it.

On an accelerator, an attention registered with transformers computes what "sdpa" computes, with less. For a batch with
padding, "sdpa" asks the device for each token whether the mask hides anything, which makes the host wait. Also, that of
transformers 5.17 copies keys and values for each query head that shares them: with 2 query heads to a key-value head it
reads or writes five times the cache's bytes for each token, with 8 heads 17 times (5.23 does not).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlframework.generation.sdk import cache_argument, scaled_logits
from rlframework_transformers.cache import PreallocatedLayer, decoding_cache, stack_rows

ATTENTION = "rlframework_decoding"
_OTHER_SCORES = ("position_bias", "softcap", "s_aux")


@contextmanager
def decoding_attention(config: Any, device: torch.device) -> Iterator[None]:
    """Switch models of `config` from "sdpa" to `ATTENTION`; leaves other attentions, and a CPU's, as they are."""
    text = config.get_text_config()
    previous = text._attn_implementation
    if device.type == "cpu" or previous != "sdpa":
        yield
        return
    AttentionInterface.register(ATTENTION, grouped_attention)
    AttentionMaskInterface.register(ATTENTION, padding_mask)
    text._attn_implementation = ATTENTION
    try:
        yield
    finally:
        text._attn_implementation = previous


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' "sdpa": `query [B, heads, Q, D]`, output `[B, Q, heads, D]`.

    With one query per row and a mask, `[B, 1, 1, S]`, the query heads of a key-value head are computed as its queries,
    so that no key or value is copied. Without a mask torch's kernels share them by themselves.
    """
    batch, heads, queries, size = query.shape
    own_kind = any(kwargs.get(name) is not None for name in _OTHER_SCORES)
    if queries != 1 or attention_mask is None or attention_mask.shape[1] != 1 or own_kind:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    grouped = query.reshape(batch, key.shape[1], -1, size)
    output = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(batch, 1, heads, -1), None


def padding_mask(*, attention_mask: Tensor | None, allow_is_causal_skip: bool = True, **kwargs: Any) -> Tensor | None:
    """Make the mask of "sdpa"; if `attention_mask [B, S]` is given, without asking whether it hides anything."""
    kwargs["allow_is_causal_skip"] = allow_is_causal_skip and attention_mask is None
    return sdpa_mask(attention_mask=attention_mask, **kwargs)


Prefix = Sequence[tuple[Tensor, Tensor]]
"""The keys and values `[heads, m, D]` of the first `m` tokens of a row, for each layer."""

_TRIMMED = 4
"""Columns that are padding in all rows are removed once they are 1 / `_TRIMMED` of the width: it copies the cache."""


class RowForward(ABC):
    """The model with what it keeps of the rows that it computes together. Equal prompts are computed once."""

    equal_lengths: ClassVar[bool] = True
    """Whether all rows must have equal lengths."""

    compact: ClassVar[bool] = False
    """Whether removing a row costs little, so that finished rows are removed at once."""

    def __init__(self, model: Any, pad_id: int, device: torch.device) -> None:
        self.model, self._pad_id, self._device = model, pad_id, device
        self._accepted = set(inspect.signature(model.forward).parameters)
        self._cache_name = cache_argument(model)

    @abstractmethod
    def start(self, prompts: Sequence[Tensor], longest: int, prefixes: Sequence[Prefix | None] = ()) -> Tensor:
        """Begin with rows of `prompts`, 1-D int64 on the CPU; return the logits `[n, V]` after them.

        Each row gets at most `longest` new tokens. `prefixes`: what `tokens_of` returned, of fewer tokens than the
        prompt has.
        """

    def join(self, prompts: Sequence[Tensor], longest: int, prefixes: Sequence[Prefix | None] = ()) -> Tensor | None:
        """Add rows after the present ones, and return as `start`; None if this model's rows cannot be added."""
        return None

    def tokens_of(self, row: int) -> Prefix | None:
        """Return the keys and values of a row, for rows that continue it; None if they cannot be used by others."""
        return None

    @abstractmethod
    def advance(self, tokens: Tensor) -> Tensor:
        """Append a token to each row, `[n]`; return the next logits `[n, V]`."""

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Continue with `rows [m]`, on the CPU, only; a row may be repeated."""

    def _call(self, ids: Tensor, **inputs: Any) -> Tensor:
        if "logits_to_keep" in self._accepted:
            inputs["logits_to_keep"] = 1
        with decoding_attention(self.model.config, ids.device), logits_in_fp32(self.model, ids.device):
            logits: Tensor = self.model(input_ids=ids, **inputs).logits[:, -1]
        return logits

    def _distinct(self, prompts: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Return the distinct ones of `prompts`, and for each of all which of these it is, `[n]` on the CPU."""
        distinct: dict[tuple[int, ...], int] = {}
        numbers = [distinct.setdefault(tuple(prompt.tolist()), len(distinct)) for prompt in prompts]
        return [torch.tensor(prompt) for prompt in distinct], torch.tensor(numbers)

    def _expanded(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """Repeat the computed rows as in `numbers [n]`, and their `logits`."""
        if len(logits) == len(numbers):
            return logits
        self.keep(numbers)
        return logits[numbers.to(logits.device)]


class PaddedRows(RowForward):
    """Rows padded on the left, with an attention mask, positions and a cache."""

    equal_lengths = False

    def start(self, prompts: Sequence[Tensor], longest: int, prefixes: Sequence[Prefix | None] = ()) -> Tensor:
        """See `RowForward.start`."""
        distinct, numbers = self._distinct(prompts)
        ids = pad_sequence(distinct, batch_first=True, padding_value=self._pad_id, padding_side="left")
        self._width = ids.shape[1]
        self._cache: Any = _cache(self.model, self._device, self._width + longest)
        self._place([self._width - len(prompt) for prompt in distinct])
        positions = torch.arange(self._width, device=self._device) - self._starts[:, None]
        return self._expanded(self._cached(ids.to(self._device), positions.clamp_(min=0)), numbers)

    def join(self, prompts: Sequence[Tensor], longest: int, prefixes: Sequence[Prefix | None] = ()) -> Tensor | None:
        """See `RowForward.join`. Rows of a cache with other layers than `PreallocatedLayer` cannot be added."""
        if not all(type(layer) is PreallocatedLayer for layer in self._cache.layers):
            return None
        other = self._empty()
        logits = other.start(prompts, longest)
        width = max(self._width, other._width)
        stack_rows([self._cache, other._cache], width, longest)
        paddings = [padding + width - rows._width for rows in (self, other) for padding in rows._paddings]
        self._width = width
        self._place(paddings)
        self._joined(other)
        return logits

    def _empty(self) -> Self:
        """Rows of the same kind, for those that join these."""
        return type(self)(self.model, self._pad_id, self._device)

    def _joined(self, other: Self) -> None:
        """Take over what a subclass keeps of the rows of `other`, which come after these."""

    def advance(self, tokens: Tensor) -> Tensor:
        """See `RowForward.advance`."""
        positions = (self._width - self._starts)[:, None]
        self._width += 1
        return self._cached(tokens[:, None], positions)

    def keep(self, rows: Tensor) -> None:
        """See `RowForward.keep`."""
        self._cache.reorder_cache(rows.to(self._device))
        self._place([self._paddings[row] for row in rows.tolist()])
        common = min(self._paddings)
        if common * _TRIMMED >= self._width and all(type(layer) is PreallocatedLayer for layer in self._cache.layers):
            for layer in self._cache.layers:
                layer.keys, layer.values = layer.keys[..., common:, :], layer.values[..., common:, :]
            self._width -= common
            self._place([padding - common for padding in self._paddings])

    def _place(self, paddings: list[int]) -> None:
        """Set how many columns of padding each row has."""
        self._paddings = paddings
        self._starts = torch.tensor(paddings).to(self._device)

    def _cached(self, ids: Tensor, positions: Tensor) -> Tensor:
        inputs = {"position_ids": positions} if "position_ids" in self._accepted else {}
        mask = None
        if any(self._paddings):
            mask = (torch.arange(self._width, device=self._device) >= self._starts[:, None]).long()
        return self._call(ids, attention_mask=mask, use_cache=True, **{self._cache_name: self._cache}, **inputs)


class EqualRows(PaddedRows):
    """Rows of equal length, without padding: the model finds positions and attention masks itself."""

    equal_lengths = True

    def _cached(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self._call(ids, use_cache=True, **{self._cache_name: self._cache})


class WholeRows(RowForward):
    """Rows of equal length without a cache: each forward computes the whole rows."""

    compact = True

    def start(self, prompts: Sequence[Tensor], longest: int, prefixes: Sequence[Prefix | None] = ()) -> Tensor:
        """See `RowForward.start`."""
        distinct, numbers = self._distinct(prompts)
        self._ids = torch.stack(distinct).to(self._device)
        return self._expanded(self._call(self._ids, use_cache=False), numbers)

    def advance(self, tokens: Tensor) -> Tensor:
        """See `RowForward.advance`."""
        self._ids = torch.cat((self._ids, tokens[:, None]), 1)
        return self._call(self._ids, use_cache=False)

    def keep(self, rows: Tensor) -> None:
        """See `RowForward.keep`."""
        self._ids = self._ids[rows.to(self._device)]


def _cache(model: Any, device: torch.device, capacity: int) -> Any:
    """An empty cache; on a GPU memory is planned for the longest rows, a CPU's grows with those that there are."""
    return decoding_cache(model.config, None if device.type == "cpu" else capacity)


@contextmanager
def logits_in_fp32(model: Any, device: torch.device) -> Iterator[None]:
    """Have the linear head of a half-precision `model` return the fp32 products of its factors, as the trainer does.

    Rounded to bfloat16, a logit of 20 is off by up to 0.06, and so are log-probabilities: the trainer would see a
    policy other than the one that sampled. Leaves a model on a CPU as it is.
    """
    head = model.get_output_embeddings()
    if device.type == "cpu" or type(head) is not nn.Linear or head.weight.dtype == torch.float32:
        yield
        return
    handle = head.register_forward_hook(_product)
    try:
        yield
    finally:
        handle.remove()


def _product(head: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The hook: the product once more; a token's is small, because the head sees a row's last position only."""
    rows = inputs[0].reshape(-1, inputs[0].shape[-1])
    return scaled_logits(rows, head.weight, head.bias, 1.0).view(output.shape)

"""Rows of any lengths in one packed row, on a CPU: no padding is computed, and a shared prompt is attended to once.

Each forward takes the new tokens of all rows as one row, as the trainer's packed rows. Keys and values are kept here:
those of each distinct prompt once, those of generated tokens by row. The attention of a token to its prompt and that to
the tokens after the prompt are computed apart and merged by their normalizers; the queries of all rows with a prompt
read its keys together, and so do the query heads that share a key-value head. While no prompts are shared, prompts are
kept with their rows instead, and there is one attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rlframework.base.errors import NotSupported
from rlframework.generation.sdk import PLAIN, RowLayout, Scores, Segments, attention, register
from rlframework_transformers.key_values import KeyValues, SharedPrompts, Slots
from rlframework_transformers.row_forward import Prefix, RowForward

PREFILL_TOKENS = 4096
"""Tokens of prompts in a forward, unless a single prompt has more: bounds the memory of activations."""


@dataclass(eq=False)
class _Prompt:
    """A prompt that rows share: its tokens as bytes, their number, and the logits `[V]` after it."""

    key: bytes
    length: int
    logits: Tensor = field(default_factory=lambda: torch.empty(0))


class PackedRows(RowForward):
    """Rows in one packed row. Not supported: chunked attention, soft-capped scores, sinks; keys unlike values."""

    equal_lengths = False
    compact = True

    def start(self, prompts: Sequence[Tensor], longest: int, prefixes: Sequence[Prefix | None] = ()) -> Tensor:
        """See `RowForward.start`."""
        register()
        self._kept = KeyValues()
        self._plan: SharedPrompts | None = None
        self._prompts: list[_Prompt] = []
        self._slots = torch.empty(0, dtype=torch.int64)  # of each row, its prompt; -1: it is kept with the row
        self._lengths = torch.empty(0, dtype=torch.int64)  # of each row, its tokens after a prompt in a slot
        return self.join(prompts, longest, prefixes)

    def join(self, prompts: Sequence[Tensor], longest: int, prefixes: Sequence[Prefix | None] = ()) -> Tensor:
        """See `RowForward.join`."""
        self._plan = None
        if not self._prompts and len({prompt.numpy().tobytes() for prompt in prompts}) == len(prompts):
            return self._join_unshared(prompts, longest, prefixes)
        self._kept.rows.expect(longest)
        known = {prompt.key: slot for slot, prompt in enumerate(self._prompts)}
        keys = [prompt.numpy().tobytes() for prompt in prompts]
        new: dict[bytes, tuple[Tensor, Prefix | None]] = {}
        for number, (key, prompt) in enumerate(zip(keys, prompts, strict=True)):
            if key not in known and key not in new:
                new[key] = prompt, prefixes[number] if prefixes else None
        for part in _parts([len(prompt) for prompt, _ in new.values()]):
            self._prefill(list(new.items())[part])
        known = {prompt.key: slot for slot, prompt in enumerate(self._prompts)}
        slots = torch.tensor([known[key] for key in keys])
        self._slots = torch.cat((self._slots, slots))
        self._lengths = torch.cat((self._lengths, torch.zeros_like(slots)))
        return torch.stack([self._prompts[slot].logits for slot in slots.tolist()])

    def _join_unshared(self, prompts: Sequence[Tensor], longest: int, prefixes: Sequence[Prefix | None]) -> Tensor:
        sizes, cached = [len(prompt) for prompt in prompts], prefixes or [None] * len(prompts)
        self._kept.rows.expect(longest + max(sizes))
        first = len(self._slots)
        logits = [
            self._computed(prompts[part], cached[part], self._kept.rows, first + part.start) for part in _parts(sizes)
        ]
        self._slots = torch.cat((self._slots, torch.full((len(prompts),), -1)))
        self._lengths = torch.cat((self._lengths, torch.tensor(sizes)))
        return torch.cat(logits)

    def advance(self, tokens: Tensor) -> Tensor:
        """See `RowForward.advance`."""
        plan = self._plan = self._plan or SharedPrompts([prompt.length for prompt in self._prompts], self._slots)
        positions = plan.given + self._lengths
        layout = _NewTokens(self._kept, plan, self._lengths, positions)
        logits = self._packed(tokens, positions, layout)
        self._lengths = self._lengths + 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """See `RowForward.keep`."""
        self._kept.rows.keep(rows, int(self._lengths.max()))
        self._slots, self._lengths = self._slots[rows], self._lengths[rows]
        used = torch.bincount(self._slots + 1, minlength=len(self._prompts) + 1)[1:] > 0
        if not bool(used.all()):
            kept = with_holes_filled(used)
            self._kept.prompts.keep(kept, max(prompt.length for prompt in self._prompts))
            self._prompts = [self._prompts[slot] for slot in kept.tolist()]
            numbers = torch.full((len(used) + 1,), -1)  # the last one: rows without a slot
            numbers[kept] = torch.arange(len(kept))
            self._slots = numbers[self._slots]
        self._plan = None

    def tokens_of(self, row: int) -> Prefix:
        """See `RowForward.tokens_of`. Returns copies."""
        slot, own = int(self._slots[row]), int(self._lengths[row])
        return self._kept.row(slot, 0 if slot < 0 else self._prompts[slot].length, row, own)

    def _prefill(self, new: Sequence[tuple[bytes, tuple[Tensor, Prefix | None]]]) -> None:
        """Compute prompts that may be shared, and keep them."""
        prompts, cached = zip(*(given for _, given in new), strict=True)
        logits = self._computed(prompts, cached, self._kept.prompts, len(self._prompts))
        for (key, (prompt, _)), after in zip(new, logits, strict=True):
            self._prompts.append(_Prompt(key, len(prompt), after))

    def _computed(self, prompts: Sequence[Tensor], cached: Sequence[Prefix | None], slots: Slots, first: int) -> Tensor:
        """Return the logits `[n, V]` after `prompts`, whose keys and values are put into `slots` from `first` on."""
        known = [0 if each is None else each[0][0].shape[1] for each in cached]
        ids = [prompt[count:] for prompt, count in zip(prompts, known, strict=True)]
        positions = [torch.arange(count, count + len(part)) for part, count in zip(ids, known, strict=True)]
        ends = list(accumulate(len(part) for part in ids))
        layout = _NewPrompts(slots, first, [len(part) for part in ids], cached)
        return self._packed(torch.cat(ids), torch.cat(positions), layout, torch.tensor(ends) - 1)

    def _packed(self, ids: Tensor, positions: Tensor, layout: RowLayout, wanted: Tensor | None = None) -> Tensor:
        """Return the logits `[n, V]` of a packed row, at the `wanted` tokens."""
        inputs: dict[str, Any] = {"position_ids": positions[None], "use_cache": False, "row_layout": layout}
        cut = wanted is not None and "logits_to_keep" in self._accepted
        if cut:
            inputs["logits_to_keep"] = wanted
        with attention(self.model.config):
            logits: Tensor = self.model(input_ids=ids[None], **inputs).logits[0]
        return logits if wanted is None or cut else logits[wanted]


class _NewPrompts(RowLayout):
    """Prompts in a packed row, of `sizes` new tokens; keeps their keys and values from slot `first` on.

    `cached`: of each, the keys and values of earlier tokens.
    """

    def __init__(self, slots: Slots, first: int, sizes: Sequence[int], cached: Sequence[Prefix | None]) -> None:
        self._slots, self._first, self._sizes, self._cached = slots, first, sizes, cached
        self._layer = 0
        self._segments = Segments([0, *accumulate(sizes)]) if all(each is None for each in cached) else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Tensor:
        """See `RowLayout.attend`."""
        _require_supported(scores)
        layer, self._layer = self._layer, self._layer + 1
        outputs: list[Tensor] = []
        states: list[tuple[Tensor, Tensor]] = []
        parts = zip(*(tensor.split(self._sizes, 2) for tensor in (query, key, value)), self._cached, strict=True)
        for queries, keys, values, cached in parts:
            if cached is not None:
                keys, values = (
                    torch.cat((early[None], late), 2) for early, late in zip(cached[layer], (keys, values), strict=True)
                )
            states.append((keys[0], values[0]))
            if self._segments is None:
                outputs.append(self.causal(queries, keys, values, scores))
        self._slots.put(layer, self._first, states)
        return torch.cat(outputs, 1) if self._segments is None else self._segments.attend(query, key, value, scores)


class _NewTokens(RowLayout):
    """A new token of each row, in the order of the rows, which have `lengths [n]` tokens after their prompts so far."""

    def __init__(self, kept: KeyValues, plan: SharedPrompts, lengths: Tensor, positions: Tensor) -> None:
        self._kept, self._plan, self._lengths, self._positions = kept, plan, lengths, positions
        self._longest = int(lengths.max()) + 1
        self._equal = int(lengths.min()) + 1 == self._longest
        self._places = torch.arange(len(lengths)), self._longest - 1 if self._equal else lengths
        self._layer = 0
        self._masks: dict[tuple[int | None, int, torch.dtype], tuple[Tensor | None, Tensor | None]] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Tensor:
        """See `RowLayout.attend`."""
        _require_supported(scores)
        layer, self._layer = self._layer, self._layer + 1
        plan, (_, heads, rows, size), shared = self._plan, query.shape, key.shape[1]
        self._kept.rows.append(layer, self._places, self._longest, key[0].transpose(0, 1), value[0].transpose(0, 1))
        queries = query[0].transpose(0, 1).reshape(rows, shared, heads // shared, size)
        window = None if scores.window is None or int(self._positions.max()) < scores.window else scores.window
        masks = self._masks_of(window, heads // shared, query.dtype)
        own, own_sums = _attend(queries, *self._kept.rows.get(layer, rows, self._longest), masks[0], scores.scaling)
        if not plan.count:
            return own.reshape(1, rows, heads, -1)
        together = plan.gathered(queries).transpose(1, 2).flatten(2, 3)
        prompts = self._kept.prompts.get(layer, plan.count, plan.longest)
        given, given_sums = _attend(together, *prompts, masks[1], scores.scaling)
        given = plan.scattered(given.unflatten(2, (plan.most, -1)).transpose(1, 2), 0.0)
        given_sums = plan.scattered(given_sums.unflatten(2, (plan.most, -1)).transpose(1, 2), -torch.inf)
        if window is not None:  # of some rows no token of the prompt is visible any more
            beyond = (self._positions - window >= plan.given - 1)[:, None, None]
            given_sums = given_sums.masked_fill(beyond, -torch.inf)
            given = given.masked_fill(beyond[..., None], 0)
        # the share of the prompt in the sum over all exponentiated scores
        share = torch.sigmoid(given_sums - own_sums).unsqueeze(-1)
        merged = torch.lerp(own.float(), given.float(), share).to(query.dtype)
        return merged.reshape(1, rows, heads, -1)

    def _masks_of(self, window: int | None, shared: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return `_own_mask` and `_prompt_mask` as scores to add, which are the same in all layers."""
        key = window, shared, dtype
        if key not in self._masks:
            masks = self._own_mask(window), self._prompt_mask(window, shared)
            own, given = (None if mask is None else _as_scores(mask, dtype) for mask in masks)
            self._masks[key] = own, given
        return self._masks[key]

    def _own_mask(self, window: int | None) -> Tensor | None:
        """Mask of the tokens after its prompt that each row attends to, `[n, 1, 1, L]` bool; None: all."""
        if self._equal and window is None:
            return None
        columns, lengths = torch.arange(self._longest), self._lengths[:, None]
        visible = columns <= lengths
        if window is not None:
            visible &= columns > lengths - window
        return visible[:, None, None]

    def _prompt_mask(self, window: int | None, shared: int) -> Tensor | None:
        """Mask of the prompt tokens to attend to, `[d, 1, 1, P]` bool (`[d, 1, m * shared, P]` with a window)."""
        plan = self._plan
        if not plan.count:
            return None
        columns = torch.arange(plan.longest)
        if window is None:
            return None if plan.equal else (columns < plan.lengths[:, None])[:, None, None]
        visible = (columns < plan.given[:, None]) & (columns > self._positions[:, None] - window)
        return plan.gathered(visible).repeat_interleave(shared, 1)[:, None]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Return the attention `[b, h, q, D]` and the logarithm of the sum of the exponentiated scores, `[b, h, q]`."""
    output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=mask, scale=scaling
    )
    return output, sums


def _as_scores(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)


def _require_supported(scores: Scores) -> None:
    if not scores.fused or scores.chunk is not None:
        raise NotSupported("packed rows are decoded without chunks, soft caps and sinks")


def _parts(sizes: Sequence[int]) -> list[slice]:
    """Divide items of `sizes` into slices of at most `PREFILL_TOKENS`, at least an item each."""
    parts, start, total = [], 0, 0
    for number, size in enumerate(sizes):
        if number > start and total + size > PREFILL_TOKENS:
            parts.append(slice(start, number))
            start, total = number, 0
        total += size
    return [*parts, slice(start, len(sizes))] if sizes else []


def with_holes_filled(kept: Tensor) -> Tensor:
    """Return the indices where `kept [n]` is true: in their places if possible, the last ones in place of others."""
    count = int(kept.sum())
    order = torch.arange(count)
    order[~kept[:count]] = kept[count:].nonzero()[:, 0] + count
    return order

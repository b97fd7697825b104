"""Keys and values of prompts and of rows, in memory that grows with them, and those of sessions between their turns;
and which rows share prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from rlframework_transformers.row_forward import Prefix

_FIRST_POSITIONS = 256
"""Positions that memory is allocated for at first, unless fewer are expected; later it doubles."""

_ALIGNMENT = 64
"""Bytes: the width of a vector register, and a cache line."""


class Slots:
    """Keys and values by layer and slot: `[slots, heads, positions, D]`, of which a slot may use fewer positions."""

    def __init__(self) -> None:
        self._layers: list[list[Tensor]] = []
        self._expected = 0

    def expect(self, positions: int) -> None:
        """Allow memory for `positions` positions before they are written."""
        self._expected = max(self._expected, positions)

    def put(self, layer: int, first: int, states: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write keys and values `[heads, m, D]` at the beginning of the slots from `first` on."""
        longest = max(keys.shape[1] for keys, _ in states)
        buffers = self._reserved(layer, first + len(states), longest, states[0])
        for slot, pair in enumerate(states, first):
            for buffer, state in zip(buffers, pair, strict=True):
                buffer[slot, :, : state.shape[1]] = state

    def append(self, layer: int, places: tuple[Tensor, Tensor | int], longest: int, *states: Tensor) -> None:
        """Write `states [n, heads, D]` of the first `n` slots.

        `places`: the slots, and the position of each or of all; `longest`: the positions that the slots then have.
        """
        (slots, positions), count = places, len(states[0])
        buffers = self._reserved(layer, count, longest, [state.unsqueeze(2) for state in states])
        for buffer, state in zip(buffers, states, strict=True):
            if isinstance(positions, int):
                buffer[:count, :, positions] = state
            else:
                buffer[slots, :, positions] = state

    def get(self, layer: int, slots: int, positions: int) -> tuple[Tensor, Tensor]:
        """Return the first `slots`, up to `positions`."""
        keys, values = self._layers[layer]
        return keys[:slots, :, :positions], values[:slots, :, :positions]

    def slot(self, slot: int, positions: int) -> list[tuple[Tensor, Tensor]]:
        """Return the first `positions` of a slot, keys and values `[heads, positions, D]`, for each layer."""
        return [(keys[slot, :, :positions], values[slot, :, :positions]) for keys, values in self._layers]

    def keep(self, kept: Tensor, positions: int) -> None:
        """Continue with the slots `kept [m]`, each of which has up to `positions`, or was not written to yet."""
        written = self._layers[0][0].shape[0] if self._layers else 0
        moved = ((kept != torch.arange(len(kept))) & (kept < written)).nonzero()[:, 0]
        if not len(moved):
            return
        sources = kept[moved]
        for buffer in (buffer for layer in self._layers for buffer in layer):
            buffer[moved, :, :positions] = buffer[sources, :, :positions]

    def _reserved(self, layer: int, slots: int, positions: int, states: Sequence[Tensor]) -> list[Tensor]:
        """Return the memory of a layer, with room for `slots` of `positions`; `states [..., heads, m, D]`."""
        if layer == len(self._layers):
            self._layers.append([state.new_empty(0, state.shape[-3], 0, state.shape[-1]) for state in states])
        buffers = self._layers[layer]
        have, room = buffers[0].shape[0], buffers[0].shape[2]
        if slots > have or positions > room:
            if slots > have:
                have = max(slots, have + have // 4)
            if positions > room:
                room = max(positions, min(self._expected, max(_FIRST_POSITIONS, 2 * positions)))
            buffers[:] = [_enlarged(buffer, have, room) for buffer in buffers]
        return buffers


class KeyValues:
    """Those of `prompts`, and those of `rows` after their prompts."""

    def __init__(self) -> None:
        self.prompts, self.rows = Slots(), Slots()

    def row(self, slot: int, given: int, row: int, own: int) -> list[tuple[Tensor, Tensor]]:
        """Return copies of `given` positions of a prompt and `own` of a row, `[heads, given + own, D]`, by layer."""
        if not given:
            return [(keys.clone(), values.clone()) for keys, values in self.rows.slot(row, own)]
        if not own:  # perhaps no row was written to yet
            return [(keys.clone(), values.clone()) for keys, values in self.prompts.slot(slot, given)]
        parts = zip(self.prompts.slot(slot, given), self.rows.slot(row, own), strict=True)
        return [(torch.cat((early[0], late[0]), 1), torch.cat((early[1], late[1]), 1)) for early, late in parts]


def _enlarged(buffer: Tensor, slots: int, positions: int) -> Tensor:
    """A copy of `buffer` at the beginning of `[slots, heads, positions, D]`; the rest is zero."""
    larger = _zeros((slots, buffer.shape[1], positions, buffer.shape[3]), buffer.dtype)
    larger[: buffer.shape[0], :, : buffer.shape[2]] = buffer
    return larger


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros, of which the operating system provides a page when it is first written to; torch's own write all pages."""
    size = prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(size + _ALIGNMENT, np.uint8))
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + size].view(dtype).view(shape)


@dataclass(frozen=True)
class _Turn:
    version: int
    ids: Tensor  # of the tokens that `prefix` has
    prefix: Prefix


class SessionPrefixes:
    """The latest turn of each session, of up to `limit` tokens in all: the sessions used least recently leave first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turns: OrderedDict[str, _Turn] = OrderedDict()

    @property
    def tokens(self) -> int:
        """The number of tokens that are kept."""
        return sum(len(turn.ids) for turn in self._turns.values())

    @property
    def bytes(self) -> int:
        """The memory of what is kept."""
        return sum(part.nbytes for turn in self._turns.values() for layer in turn.prefix for part in layer)

    def store(self, session: str, version: int, ids: Tensor, prefix: Prefix) -> None:
        """Keep `prefix`, computed with the weights of `version` from `ids [m]`."""
        self._turns.pop(session, None)
        self._turns[session] = _Turn(version, ids, prefix)
        while self.tokens > self._limit:
            self._turns.popitem(last=False)

    def find(self, session: str, version: int, ids: Tensor) -> Prefix | None:
        """Return what is known of the beginning of `ids [n]`, at most of all but the last; None if nothing is."""
        turn = self._turns.get(session)
        if turn is None or turn.version != version:
            return None
        self._turns.move_to_end(session)
        size = min(len(turn.ids), len(ids) - 1)
        differs = (turn.ids[:size] != ids[:size]).nonzero()
        size = int(differs[0]) if len(differs) else size
        return [(keys[:, :size], values[:, :size]) for keys, values in turn.prefix] if size else None

    def drop(self) -> int:
        """Forget all; return the number of tokens that were kept."""
        tokens = self.tokens
        self._turns.clear()
        return tokens


class SharedPrompts:
    """Which rows share prompts of `lengths`: `slots [n]` are those of the rows, -1 for rows that have none.

    The queries of a prompt's rows are adjacent in `[d, m]`, where `m` is the largest number of rows of a prompt;
    `places` are those of the rows `sharing`. `given [n]`: the length of each row's prompt in a slot.
    """

    def __init__(self, lengths: Sequence[int], slots: Tensor) -> None:
        self.lengths, self.count = torch.tensor(lengths, dtype=torch.int64), len(lengths)
        self.given = torch.cat((self.lengths, torch.zeros(1, dtype=torch.int64)))[slots]
        if not lengths:
            return
        self.equal = min(lengths) == max(lengths)
        self.rows, self.sharing = len(slots), (slots >= 0).nonzero()[:, 0]
        slots = slots[self.sharing]
        order = torch.argsort(slots, stable=True)
        counts = torch.bincount(slots, minlength=self.count)
        firsts = counts.cumsum(0) - counts
        ranks = torch.empty_like(slots)
        ranks[order] = torch.arange(len(slots)) - firsts[slots[order]]
        self.most = int(counts.max())
        self.places = slots * self.most + ranks
        self.trivial = torch.equal(self.places, torch.arange(self.count * self.most)) and len(slots) == self.rows
        self.longest = int(self.lengths.max())

    def gathered(self, rows: Tensor) -> Tensor:
        """Arrange `rows [n, ...]` as `[d, m, ...]`, with zeros between them."""
        if not self.trivial:
            spread = rows.new_zeros(self.count * self.most, *rows.shape[1:])
            rows = spread.index_copy_(0, self.places, rows[self.sharing])
        arranged: Tensor = rows.unflatten(0, (self.count, self.most))
        return arranged

    def scattered(self, gathered: Tensor, absent: float) -> Tensor:
        """Invert `gathered`; rows without a prompt in a slot are filled with `absent`."""
        rows = gathered.flatten(0, 1)
        if self.trivial:
            return rows
        spread = rows.new_full((self.rows, *rows.shape[1:]), absent)
        return spread.index_copy_(0, self.sharing, rows[self.places])

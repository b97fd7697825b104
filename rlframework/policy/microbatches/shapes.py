"""The shapes that microbatches are padded to: exact on a CPU, one of few on a GPU (`MicrobatchRule.few_shapes`).

The extra tokens have no head positions, so they change no result. With a maximum of T tokens per microbatch,

- a packed row has a multiple of T / 16 tokens, so at most 16 lengths, and T / 32 more tokens in the mean (3 %);
- widths and numbers of padded and dynamic rows are those of `step_up`: 8 per power of two, so at most 1/8 more, and
  1/24 in the mean (4 %). Up to 15 rows nothing is added.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlframework.batch.batch_rows import round_up

PACKED_LENGTHS = 16
LEAST = 128
"""Lengths are multiples of this, the tokens that one block of an attention kernel takes."""


@dataclass(frozen=True)
class Padding:
    """Pads lengths to a multiple of `multiple` and, with `few`, to one of few values.

    `tokens`: the maximum per microbatch, which padding does not exceed; None: unlimited. `groups`: dynamic microbatches
    were planned by exact lengths, because a group may fit only with them, so their rows share the maximum.
    """

    multiple: int = 1
    few: bool = False
    tokens: int | None = None
    groups: bool = False

    def packed(self, tokens: int) -> int:
        """Return the length of a packed row of `tokens` tokens."""
        least = round_up(max(tokens, 1), self.multiple)
        if not self.few or self.tokens is None:
            return least
        most = self.tokens // self.multiple * self.multiple
        if least > most:  # planned for other ranks too, of which one has a longer row
            return round_up(step_up(least, LEAST), self.multiple)
        step = round_up(max(-(-most // PACKED_LENGTHS), LEAST), self.multiple)
        return min(round_up(least, step), most)

    def width(self, longest: int, rows: int = 1) -> int:
        """Return the width of `rows` padded rows of at most `longest` tokens; the number counts with `groups` only."""
        least = round_up(longest, self.multiple)
        if not self.few:
            return least
        width = round_up(step_up(longest, LEAST), self.multiple)
        if self.tokens is None:
            return width
        most = self.tokens // (rows if self.groups else 1)
        return min(width, max(most // self.multiple * self.multiple, least))

    def rows(self, rows: int, width: int) -> int:
        """Return the number of rows that `rows` rows of `width` are padded to."""
        if not self.few:
            return rows
        padded = step_up(rows)
        most = padded if self.tokens is None else self.tokens // width
        return padded if rows > most else min(padded, most)


NO_PADDING = Padding()


def step_up(value: int, least: int = 1) -> int:
    """Round up to one of 8 values per power of two, all multiples of `least`, a power of two."""
    unit = 1 << max((max(value, 1) - 1).bit_length() - 4, 0)
    return round_up(max(value, 1), max(unit, least))

"""Lengths and costs of rows, groups of rows that share a microbatch, and assigning bins of rows to shards by cost."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain, cycle
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlframework.base.errors import BatchError, BatchTypeError
from rlframework.batch.batch_rows import read_count

GroupIds = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor
"""The group of each row: a list, numpy array or 1-D tensor of integers. Rows with equal ids are a group."""


@dataclass(frozen=True)
class RowGroups:
    """Groups in the order of their first rows, each with its rows in ascending order.

    `ids [groups]`: the id of each. `rows [n]`: the rows, group by group. `starts [groups]`: the place in `rows` where
    each begins. `alone`: each row is a group of its own, so that groups are numbered as rows are.
    """

    ids: Ints
    rows: Ints
    starts: Ints
    alone: bool = False

    @classmethod
    def of(cls, ids: GroupIds | None, rows: int) -> RowGroups:
        """Return the groups of `rows` rows; without `ids`, each row is one.

        Raises `BatchTypeError` unless `ids` are `rows` integers.
        """
        if ids is None:
            each = np.arange(rows)
            return cls(each, each, each, alone=True)
        values = np.asarray(ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else ids)
        if values.shape != (rows,) or (rows and values.dtype.kind not in "iu"):
            given = f"{values.dtype} {list(values.shape)}"
            raise BatchTypeError(f"group ids must be one integer for each of the {rows} rows, got {given}")
        unique, first, inverse = np.unique(values, return_index=True, return_inverse=True)
        order = np.argsort(first)
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        of_row = number[inverse.reshape(-1)]
        sizes = np.bincount(of_row, minlength=len(order))
        return cls(unique[order], np.argsort(of_row, kind="stable"), np.cumsum(sizes) - sizes)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def sizes(self) -> Ints:
        """The number of rows `[groups]` of each group."""
        return np.diff(self.starts, append=len(self.rows))

    def sums(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return `[groups]`: the sum of the `values [n]` of each group's rows."""
        return values if self.alone or not len(self) else np.add.reduceat(values[self.rows], self.starts)

    def largest(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return `[groups]`: the largest of the `values [n]` of each group's rows."""
        return values if self.alone or not len(self) else np.maximum.reduceat(values[self.rows], self.starts)

    def require(self, needed: Ints, most: int, what: str, limit: str) -> None:
        """Raise `BatchError` naming the first group whose `needed [groups]`, in units of `what`, exceeds `most`."""
        if not len(self) or needed.max() <= most:
            return
        group = int(np.argmax(needed > most))
        raise BatchError(
            f"group {self.ids[group]} has {self.sizes[group]} rows, which need {needed[group]} {what} of a microbatch, "
            f"but {limit} is {most}: raise {limit}, or make the group smaller"
        )

    def idle(self, shards: int) -> int:
        """Return how many empty groups make the number of groups a multiple of `shards`.

        They stand for microbatches without rows, so that all shards get the same number. There are none if each row is
        a group, and none if there are fewer groups than shards, which is an error of the caller.
        """
        return 0 if self.alone or len(self) < shards else -len(self) % shards

    def expand(self, bins: Sequence[list[int]]) -> list[list[int]]:
        """Replace the groups in each bin by their rows; numbers beyond the last group are idle ones."""
        if self.alone:
            return list(bins)
        members = [rows.tolist() for rows in np.split(self.rows, self.starts[1:])]
        return [[row for group in groups if group < len(members) for row in members[group]] for groups in bins]


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Lengths = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor
"""The length of each row: a list, tuple, numpy array or 1-D tensor of integers."""

LONGEST = 2**40
"""The most tokens a row may have, so that sums of lengths stay far from the limits of int64."""


def read_lengths(lengths: Lengths, most: int = LONGEST, *, least: int = 1, limit: str = "the limit") -> Ints:
    """Return row lengths as int64 `[n]`, each in `least..most`; error messages call `most` by the name `limit`.

    Raises `BatchTypeError` for values that are not integers, and `BatchError` naming a row with a length out of bounds.
    """
    values: Any = lengths
    try:
        if isinstance(lengths, torch.Tensor):
            values = lengths.detach().cpu().numpy()
        elif isinstance(lengths, Sequence):  # for a list of integers, faster than numpy, and strict
            values = np.frombuffer(array("q", lengths) or b"", np.int64)
            if len(values) and values.min() < 2 and any(isinstance(length, (bool, np.bool_)) for length in lengths):
                raise TypeError("got a bool among them")
    except (TypeError, RuntimeError, OverflowError) as error:
        raise BatchTypeError(f"lengths must be a list or 1-D tensor of 64-bit integers: {error}") from error
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or values.ndim != 1:
        given = f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
        raise BatchTypeError(f"lengths must be a list or 1-D tensor [rows] of integers, got {given}")
    low, high, most = int(values.min(initial=least)), int(values.max(initial=0)), min(most, LONGEST)
    if low < least:
        raise BatchError(
            f"row {int(values.argmin())} of {len(values)} has length {low}, but it must be at least {least}"
            + ("; only the algorithm BALANCED takes rows of length 0" if low == 0 else "")
        )
    if high > most:
        raise BatchError(
            f"row {int(values.argmax())} of {len(values)} has {high} tokens, but {limit} is {most}: raise {limit} or "
            "shorten the row"
        )
    return values.astype(np.int64, copy=False)


def sort_descending(lengths: Ints) -> Ints:
    """Return row indices by descending length; of equal lengths the later row first."""
    short = len(lengths) > 512 and int(lengths.max()) < 2**16  # numpy sorts 16 bits by radix, in O(n)
    return np.argsort(lengths.astype(np.uint16) if short else lengths, kind="stable")[::-1]


def bin_sums(bins: Sequence[Sequence[int]], values: Ints | Floats) -> Floats:
    """Return `[bins]`: the sum of the `values [rows]` of each bin's rows."""
    where = np.repeat(np.arange(len(bins)), np.fromiter(map(len, bins), dtype=np.int64, count=len(bins)))
    rows = np.fromiter(chain.from_iterable(bins), dtype=np.int64)
    return np.bincount(where, values[rows], len(bins)).astype(np.float64)


def spread_empty(bins: list[list[int]], wanted: int, rows: Ints) -> None:
    """Add bins up to `wanted`, and `rows` of length 0: first one to each bin without rows, then to all bins in turn."""
    bins += [[] for _ in range(wanted - len(bins))]
    without_rows = [members for members in bins if not members]
    for row, members in zip(rows.tolist(), chain(without_rows, cycle(bins)), strict=False):
        members.append(row)


@dataclass(frozen=True)
class TokenCost:
    """A row of `n` tokens costs `linear * n + attention * n * n`, in units of one token without its attention.

    In a transformer of hidden size `h`, the matrices of a layer take `24 h^2` operations per token, and causal
    attention over `n` tokens takes `2 h n` per token (Kaplan et al. 2020, arXiv:2001.08361, table 1): so `attention` is
    `1 / (12 h)`. The default is for `h = 2048`. Both must be finite and not negative, and at least one above 0.
    """

    linear: float = 1.0
    attention: float = 1.0 / (12 * 2048)

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise BatchTypeError(f"TokenCost.{name} must be a number, got {value!r}")
            if not 0 <= value <= 1e30:  # false for NaN
                raise BatchError(f"TokenCost.{name} must be a finite number from 0 to 1e30, got {value!r}")
        if max(self.linear, self.attention) < 1e-30:
            raise BatchError("TokenCost.linear and TokenCost.attention are both 0; at least one must be positive")

    @classmethod
    def for_hidden_size(cls, hidden: int) -> TokenCost:
        """Return the cost for a dense model of this hidden size."""
        return cls(attention=1.0 / (12 * read_count(hidden, "the hidden size", 1)))

    def of_rows(self, lengths: npt.ArrayLike) -> Floats:
        """Return the costs `[n]` float64 of rows of `lengths [n]`, each of which attends only to itself."""
        tokens = np.asarray(lengths, dtype=np.float64)
        costs: Floats = (self.attention * tokens + self.linear) * tokens
        return costs


def assign_by_cost(costs: Floats, shards: int) -> list[list[int]]:
    """Assign bins of `costs [bins]` to shards that run step by step together; return bin numbers, `[shard][step]`.

    The number of bins must be a multiple of `shards`. All shards wait for the costliest bin of a step, so each step
    gets bins that are adjacent in the order of cost, the costliest first: exchanging bins between two steps could only
    raise the sum over the steps of their costliest bins. Within a step the costliest bin goes to the shard with the
    least cost so far, which keeps the totals of the shards alike.
    """
    order = np.argsort(-costs, kind="stable").reshape(-1, shards)
    totals = [0.0] * shards
    assigned: list[list[int]] = [[] for _ in range(shards)]
    ranked = list(range(shards))  # the shards by ascending total
    for numbers, values in zip(order.tolist(), costs[order].tolist(), strict=True):
        ranked.sort(key=totals.__getitem__)
        for shard, number, value in zip(ranked, numbers, values, strict=True):
            assigned[shard].append(number)
            totals[shard] += value
    return assigned

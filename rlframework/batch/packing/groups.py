"""Groups of rows that share a microbatch. The packers place whole groups; a row without one is a group of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlframework.base.errors import BatchError, BatchTypeError
from rlframework.batch.packing.lengths import Ints

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

"""Validation of the arguments of packers: row lengths, bins and counts; and sorting and summing of arrays of them."""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from rlframework.errors import BatchError, BatchTypeError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
AnyArray = npt.NDArray[Any]

LONGEST = 2**40
"""The most tokens a row may have, so that sums of lengths stay far from the limits of int64."""


def read_lengths(lengths: Any, most: int | None = None, *, least: int = 1, limit: str = "bin_capacity") -> Ints:
    """Return row lengths (a list, tuple, range, numpy array or 1-D tensor of integers) as int64 `[n]`.

    Each must be in `least..most`; error messages call `most` by the name `limit`. Raises `BatchTypeError` for values
    that are not integers, and `BatchError` naming the row for a length out of bounds.
    """
    values = _as_array(lengths)
    if not len(values):
        return np.empty(0, dtype=np.int64)
    low, high = int(values.min()), int(values.max())
    if low < least:
        raise BatchError(
            f"row {int(values.argmin())} of {len(values)} has length {low}, but it must be at least {least}"
            + ("; only the algorithm BALANCED takes rows of length 0" if low == 0 else "")
        )
    if most is not None and high > most:
        raise BatchError(
            f"row {int(values.argmax())} of {len(values)} has {high} tokens, but {limit} is {most}: raise {limit} or "
            "shorten the row"
        )
    if high > LONGEST:
        raise BatchError(f"row {int(values.argmax())} has {high} tokens; no row may have more than {LONGEST}")
    return values.astype(np.int64, copy=False)


def _as_array(lengths: Any) -> AnyArray:
    torch = sys.modules.get("torch")  # a caller with a tensor has imported torch
    if torch is not None and isinstance(lengths, torch.Tensor):
        try:
            lengths = lengths.detach().cpu().numpy()
        except (TypeError, RuntimeError, NotImplementedError) as error:
            raise BatchTypeError(f"lengths must be a plain tensor of integers: {error}") from error
    if isinstance(lengths, np.ndarray):
        if lengths.dtype.kind not in "iu":
            raise BatchTypeError(f"lengths must be integers, got an array or tensor of {lengths.dtype}")
        if lengths.ndim != 1:
            raise BatchError(f"lengths must have one dimension [rows], got shape {list(lengths.shape)}")
        return lengths
    return _from_sequence(lengths)


def _from_sequence(lengths: Any) -> AnyArray:
    if not isinstance(lengths, Sequence) or isinstance(lengths, (str, bytes, bytearray, memoryview)):
        raise BatchTypeError(f"lengths must be a list or 1-D tensor of integers, got a {type(lengths).__name__}")
    try:
        values = np.frombuffer(array("q", lengths), dtype=np.int64) if len(lengths) else np.empty(0, dtype=np.int64)
    except OverflowError:
        raise BatchError(f"a row's length does not fit into 64 bits; lengths must be in 0..{LONGEST}") from None
    except TypeError as error:
        raise BatchTypeError(f"lengths must be integers: {error}; pass a tensor itself, not a list of it") from None
    if len(values) and values.min() < 2 and any(isinstance(length, (bool, np.bool_)) for length in lengths):
        raise BatchTypeError("lengths must be integers, got a bool among them")
    return values


def read_count(value: Any, name: str, least: int, most: int | None = None) -> int:
    """Return `value` as an int in `least..most`; raise `BatchTypeError` or `BatchError` naming it otherwise."""
    if isinstance(value, (bool, np.bool_)):
        raise BatchTypeError(f"{name} must be an integer, got {value!r}")
    try:
        count = operator.index(value)
    except TypeError:
        raise BatchTypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})") from None
    if count < least:
        raise BatchError(f"{name} must be at least {least}, got {count}")
    if most is not None and count > most:
        raise BatchError(f"{name} must be at most {most}, got {count}")
    return count


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def join_bins(bins: Sequence[Sequence[int]], rows: int) -> tuple[Ints, Ints]:
    """Return the rows of all bins concatenated, and their counts `[bins]`; raise `BatchError` for an invalid row."""
    try:
        counts = np.fromiter(map(len, bins), dtype=np.int64, count=len(bins))
        joined = np.fromiter(chain.from_iterable(bins), dtype=np.int64, count=int(counts.sum()))
    except (TypeError, ValueError, OverflowError) as error:
        raise BatchTypeError(f"bins must be lists of row indices: {error}") from error
    if len(joined) and (int(joined.min()) < 0 or int(joined.max()) >= rows):
        raise BatchError(f"bins name rows {int(joined.min())}..{int(joined.max())}, but there are {rows} lengths")
    return joined, counts


def sort_descending(lengths: Ints) -> Ints:
    """Return row indices by descending length; of equal lengths the later row first."""
    return sort_ascending(lengths)[::-1]


def sort_ascending(values: Ints) -> Ints:
    """Return positions by ascending value (all at least 0); of equal values the first position first."""
    short = len(values) > 0 and int(values.max()) < 2**16  # numpy sorts 16 bits by radix, in O(n)
    return np.argsort(values.astype(np.uint16) if short else values, kind="stable")


def order_by_load(load: Floats) -> Ints:
    """Return positions by ascending load, the first of equal ones first; many loads are first rounded to 16 bits.

    The sort must be stable to give the same order on every machine. A stable sort of many floats is slow; one of 16-bit
    integers is not.
    """
    least, most = float(load.min()), float(load.max())
    if len(load) < 512 or least == most:
        return np.argsort(load, kind="stable")
    return np.argsort(((load - least) * (65_535 / (most - least))).astype(np.uint16), kind="stable")


def bin_sums(joined: AnyArray, counts: Ints) -> Floats:
    """Return the sum of `joined`, the concatenated values of the bins' rows, for each bin `[bins]`; 0 if empty."""
    sums = np.zeros(len(counts))
    some = np.flatnonzero(counts)
    if len(some):
        sums[some] = np.add.reduceat(joined, (np.cumsum(counts) - counts)[some])
    return sums

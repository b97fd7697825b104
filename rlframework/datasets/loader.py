"""Rows in batches, for ever, in shuffled epochs that can be resumed in the middle.

torchdata's StatefulDataLoader keeps the state of worker processes; there are none here, so a position is two numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from rlframework.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

T = TypeVar("T")

SHUFFLE = "pcg64-keys"
"""The way of shuffling, kept in the state: another one would lose some rows of an epoch and repeat others."""


class PromptLoader(Iterator[list[T]], Generic[T]):
    """An endless iterator of lists of `batch_size` rows of a sequence: samples, or rows of tokens.

    Each epoch has every row once, in an order that depends on `seed`, the number of the epoch and the number of rows,
    and on nothing else, such as versions of libraries. A batch may reach into the next epoch, so none is short and none
    is dropped. Memory: 8 bytes a row; rows are taken from the sequence when their batch is due.
    """

    def __init__(self, samples: Sequence[T], batch_size: int, seed: int) -> None:
        """No rows, or a batch size below 1, is a `DataError`."""
        if not len(samples):
            raise DataError("the data set is empty: there is no sample to make a batch of")
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}; it must be at least 1")
        self._samples, self._batch_size, self._seed = samples, batch_size, seed
        self._epoch = self._position = 0
        self._order = shuffled(len(samples), seed, 0)

    @property
    def epoch(self) -> int:
        """Epochs that lie behind."""
        return self._epoch

    def __next__(self) -> list[T]:
        return [self._samples[index] for index in self.indices().tolist()]

    def indices(self) -> npt.NDArray[np.int64]:
        """The numbers of the next batch's rows, `[batch_size]`, instead of the rows: moves on as `next` does."""
        batch = np.empty(self._batch_size, np.int64)
        filled = 0
        while filled < self._batch_size:
            if self._position == len(self._order):
                self._start(self._epoch + 1, 0)
            taken = self._order[self._position : self._position + self._batch_size - filled]
            batch[filled : filled + len(taken)] = taken
            filled += len(taken)
            self._position += len(taken)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: numbers and a word, to be written as JSON."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "samples": len(self._samples),
            "shuffle": SHUFFLE,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, with any batch size; else as the loader that gave it: as many rows, and the same seed.

        A state that does not fit, or is none, is a `DataError`.
        """
        mine = self.state_dict()
        missing = sorted(mine.keys() - state.keys() - {"shuffle"})
        if missing:
            raise DataError(f"this is no position in data: it lacks {missing} and has {sorted(state)}")
        for name in ("samples", "seed"):
            if state[name] != mine[name]:
                raise DataError(
                    f"the saved position in the data was for {name} = {state[name]}, here it is {mine[name]}; "
                    "resume with the data and the seed of the run that saved it"
                )
        if state.get("shuffle") != SHUFFLE:
            raise DataError(
                f"the saved position is one of another release, which shuffled in another way "
                f"({state.get('shuffle')!r}, here {SHUFFLE!r}): going on from it would repeat rows and "
                "leave others out. Resume with that release"
            )
        epoch, position = state["epoch"], state["position"]
        whole = type(epoch) is int and type(position) is int
        if not whole or epoch < 0 or not 0 <= position <= len(self._samples):
            raise DataError(
                f"the saved position is epoch {epoch!r}, row {position!r}, of {len(self._samples)} rows: there is no "
                "such place"
            )
        self._start(epoch, position)

    def _start(self, epoch: int, position: int) -> None:
        if epoch != self._epoch:
            self._order = shuffled(len(self._samples), self._seed, epoch)
        self._epoch, self._position = epoch, position


def shuffled(rows: int, seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """The numbers `0..rows-1` in the random order of an epoch.

    Each number gets random higher bits and the whole is sorted. The bits of PCG64 are the same in every version of
    numpy, which `Generator.shuffle` does not promise.
    """
    width = np.uint64(max(1, (rows - 1).bit_length()))
    low = np.uint64((1 << int(width)) - 1)
    order = np.random.PCG64([seed % 2**64, epoch]).random_raw(rows)
    order &= ~low
    order |= np.arange(rows, dtype=np.uint64)
    order.sort()
    order &= low
    return order

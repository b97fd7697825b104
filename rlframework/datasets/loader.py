"""An endless loader of batches, in shuffled epochs that can be resumed anywhere.

There are no worker processes whose state torchdata's StatefulDataLoader would keep, so a position is two numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rlframework.errors import DataError

T = TypeVar("T")

SHUFFLE = "pcg64-keys"
"""Name of the shuffling method in the state: resuming with another would skip rows of an epoch and repeat others."""


class PromptLoader(Iterator[list[T]], Generic[T]):
    """An endless iterator over lists of `batch_size` rows of a sequence: samples, or numbers of rows.

    Each epoch yields every row once, in an order that depends only on `seed`, the epoch and the number of rows, not on
    library versions. A batch may span two epochs: no batch is short, no row dropped. Takes 8 bytes of memory per row;
    rows are read from the sequence when their batch is requested.
    """

    def __init__(self, samples: Sequence[T], batch_size: int, seed: int) -> None:
        """Raises a `DataError` if there are no rows, or if `batch_size` is below 1."""
        if not len(samples):
            raise DataError("the data set is empty; give at least one sample")
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}; it must be at least 1")
        self._samples, self._batch_size, self._seed = samples, batch_size, seed
        self._start(0, 0)

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self._epoch

    def __next__(self) -> list[T]:
        indices: list[int] = []
        while len(indices) < self._batch_size:
            if self._position == len(self._order):
                self._start(self._epoch + 1, 0)
            taken = self._order[self._position : self._position + self._batch_size - len(indices)].tolist()
            indices += taken
            self._position += len(taken)
        return [self._samples[index] for index in indices]

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON-serialisable values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "samples": len(self._samples),
            "shuffle": SHUFFLE,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`. Seed and number of rows must be those that saved it; the batch size may differ.

        Raises a `DataError` if `state` does not fit.
        """
        current = self.state_dict()
        for name in ("samples", "seed"):
            if state[name] != current[name]:
                raise DataError(
                    f"the saved position in the data is for {name} = {state[name]}, not {current[name]}; resume with "
                    "the data and the seed of the run that saved it"
                )
        if state.get("shuffle") != SHUFFLE:
            raise DataError(
                f"the saved position is from a release that shuffles with {state.get('shuffle')!r} instead of "
                f"{SHUFFLE!r}: resuming from it would repeat rows and skip others. Resume with that release"
            )
        self._start(state["epoch"], state["position"])

    def _start(self, epoch: int, position: int) -> None:
        self._order = shuffled(len(self._samples), self._seed, epoch)
        self._epoch, self._position = epoch, position


def shuffled(rows: int, seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """Return `0..rows-1` in the random order of `epoch`, `[rows]` uint64.

    Sorts the numbers by random higher bits. The bits of PCG64 are stable across numpy versions, while
    `Generator.shuffle` is not guaranteed to be.
    """
    width = np.uint64(max(1, (rows - 1).bit_length()))
    low = np.uint64((1 << int(width)) - 1)
    order = np.random.PCG64([seed % 2**64, epoch]).random_raw(rows)
    order &= ~low
    order |= np.arange(rows, dtype=np.uint64)
    order.sort()
    order &= low
    return order

"""An endless loader of batches, in shuffled epochs that can be resumed anywhere.

There are no worker processes whose state torchdata's StatefulDataLoader would keep, so a position is two numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rlframework.base.errors import DataError

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

SHUFFLE = "pcg64-keys"
"""Name of the shuffling method in the state: resuming with another would skip rows of an epoch and repeat others."""


@dataclass(frozen=True)
class Source:
    """A source of a mixture: its name for metrics, its weight, and its number of rows, which follow those before it."""

    name: str
    weight: float
    rows: int


class PromptLoader(Iterator[list[T]], Generic[T]):
    """An endless iterator over lists of `batch_size` rows of a sequence: samples, or numbers of rows.

    Each epoch yields every row once, in an order that depends only on `seed`, the epoch and the number of rows, not on
    library versions. A batch may span two epochs: no batch is short, no row dropped. Takes 8 bytes of memory per row;
    rows are read from the sequence when their batch is requested.

    Of a mixture, each source has epochs of its own, and the next row is of the source that is furthest behind its share
    of all rows so far (the first of several). So after any number of rows, a source has less than one row more than its
    share, with two sources also less than one row less, and nothing but the rows drawn so far decides what follows.
    """

    def __init__(
        self, samples: Sequence[T], batch_size: int, seed: int, mixture: Sequence[Source] | None = None
    ) -> None:
        """Raises a `DataError` if there are no rows, or if `batch_size` is below 1.

        `mixture`: the sources whose rows `samples` has, in order; default: its attribute `mixture`, if it has one.
        """
        if not len(samples):
            raise DataError("the data set is empty; give at least one sample")
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}; it must be at least 1")
        if batch_size > len(samples):
            _LOG.warning(
                "a step takes %d samples, but there are only %d to train on: each %.1f times on average. Lower "
                "algorithm.prompts_per_step (policy.train_global_batch_size, if nothing is sampled), or give more data",
                batch_size, len(samples), batch_size / len(samples),
            )  # fmt: skip
        self._samples, self._batch_size, self._seed = samples, batch_size, seed
        self._mixture: Sequence[Source] = getattr(samples, "mixture", ()) if mixture is None else mixture
        sizes = [source.rows for source in self._mixture] or [len(samples)]
        if sum(sizes) != len(samples):
            raise DataError(f"the sources of the mixture have {sum(sizes)} rows, but there are {len(samples)} samples")
        self._epochs = [_Epochs(rows, seed, number) for number, rows in enumerate(sizes)]
        self._starts = [0, *accumulate(sizes)]
        self._weights = _whole([source.weight for source in self._mixture] or [1.0])
        self._recent = [0] * len(sizes)
        """Rows of each source since the metrics were taken."""

    @property
    def epoch(self) -> int:
        """The number of completed epochs; of a mixture, how often as many rows as it has were drawn."""
        return max(0, self._drawn - 1) // len(self._samples)

    def __next__(self) -> list[T]:
        indices = [self._next_index() for _ in range(self._batch_size)]
        return [self._samples[index] for index in indices]

    def pop_metrics(self) -> dict[str, float]:
        """Return `train/epoch`, the rows drawn so far divided by the number of rows.

        For each source of a mixture also `train/epoch/NAME`, and `train/rows/NAME`, its rows since the last call.
        """
        metrics = {"train/epoch": self._drawn / len(self._samples)}
        for source, epochs, recent in zip(self._mixture, self._epochs, self._recent, strict=False):
            metrics[f"train/epoch/{source.name}"] = epochs.drawn / source.rows
            metrics[f"train/rows/{source.name}"] = float(recent)
        self._recent = [0] * len(self._recent)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON-serialisable values."""
        state: dict[str, Any] = {"seed": self._seed, "samples": len(self._samples), "shuffle": SHUFFLE}
        if not self._mixture:
            return {"epoch": self._epochs[0].epoch, "position": self._epochs[0].position} | state
        positions = [{"epoch": epochs.epoch, "position": epochs.position} for epochs in self._epochs]
        return state | {"mixture": [asdict(source) for source in self._mixture], "positions": positions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`. Seed, number of rows and mixture must be those that saved it; the batch size may differ.

        Raises a `DataError` if `state` does not fit.
        """
        current = self.state_dict()
        for name in ("samples", "seed", "mixture"):
            if state.get(name) != current.get(name):
                raise DataError(
                    f"the saved position in the data is for {name} = {state.get(name)}, not {current.get(name)}; "
                    "resume with the data and the seed of the run that saved it"
                )
        if state.get("shuffle") != SHUFFLE:
            raise DataError(
                f"the saved position is from a release that shuffles with {state.get('shuffle')!r} instead of "
                f"{SHUFFLE!r}: resuming from it would repeat rows and skip others. Resume with that release"
            )
        for epochs, at in zip(self._epochs, state.get("positions", [state]), strict=True):
            epochs.start(at["epoch"], at["position"])

    @property
    def _drawn(self) -> int:
        return sum(epochs.drawn for epochs in self._epochs)

    def _next_index(self) -> int:
        number = self._furthest_behind() if self._mixture else 0
        self._recent[number] += 1
        return self._starts[number] + self._epochs[number].next_row()

    def _furthest_behind(self) -> int:
        """The source whose rows are furthest below its share after one more row, in exact numbers."""
        drawn, total = self._drawn + 1, sum(self._weights)
        behind = [
            weight * drawn - total * epochs.drawn for weight, epochs in zip(self._weights, self._epochs, strict=True)
        ]
        return behind.index(max(behind))


class _Epochs:
    """Shuffled epochs of the numbers `0..rows-1`; `stream` tells those of several sources apart."""

    def __init__(self, rows: int, seed: int, stream: int) -> None:
        self._rows, self._seed, self._stream = rows, seed, stream
        self.start(0, 0)

    def start(self, epoch: int, position: int) -> None:
        """Go to row number `position` of `epoch`."""
        self._order = shuffled(self._rows, self._seed, epoch, self._stream)
        self.epoch, self.position = epoch, position

    @property
    def drawn(self) -> int:
        """The number of rows drawn so far, in all epochs."""
        return self.epoch * self._rows + self.position

    def next_row(self) -> int:
        if self.position == self._rows:
            self.start(self.epoch + 1, 0)
        self.position += 1
        return int(self._order[self.position - 1])


def _whole(weights: Sequence[float]) -> list[int]:
    """Whole numbers with the ratios of `weights`, as they are written in decimals."""
    exact = [Fraction(repr(weight)) for weight in weights]
    factor = lcm(*(weight.denominator for weight in exact))
    return [int(weight * factor) for weight in exact]


def shuffled(rows: int, seed: int, epoch: int, stream: int = 0) -> npt.NDArray[np.uint64]:
    """Return `0..rows-1` in the random order of `epoch`, `[rows]` uint64; each `stream` has orders of its own.

    Sorts the numbers by random higher bits. The bits of PCG64 are stable across numpy versions, while
    `Generator.shuffle` is not guaranteed to be.
    """
    width = np.uint64(max(1, (rows - 1).bit_length()))
    low = np.uint64((1 << int(width)) - 1)
    entropy = [seed % 2**64, epoch, *([stream] if stream else [])]
    order = np.random.PCG64(entropy).random_raw(rows)
    order &= ~low
    order |= np.arange(rows, dtype=np.uint64)
    order.sort()
    order &= low
    return order

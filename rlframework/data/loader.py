"""Samples in batches, for ever, in shuffled epochs that can be resumed in the middle."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlframework.errors import DataError
from rlframework.interfaces.environment import Sample


class PromptLoader(Iterator[list[Sample]]):
    """An endless iterator of lists of `batch_size` samples.

    Each epoch has every sample once, in an order that depends on `seed` and the number of the epoch. A batch may reach
    into the next epoch, so none is short and none is dropped.
    """

    def __init__(self, samples: Sequence[Sample], batch_size: int, seed: int) -> None:
        """No samples, or a batch size below 1, is a `DataError`."""
        if not samples:
            raise DataError("the data set is empty: there is no sample to make a batch of")
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}; it must be at least 1")
        self._samples, self._batch_size, self._seed = samples, batch_size, seed
        self._epoch = self._position = 0
        self._order = self._shuffled()

    @property
    def epoch(self) -> int:
        """Epochs that lie behind."""
        return self._epoch

    def __next__(self) -> list[Sample]:
        batch: list[Sample] = []
        while len(batch) < self._batch_size:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffled()
            taken = self._order[self._position : self._position + self._batch_size - len(batch)]
            batch += [self._samples[index] for index in taken]
            self._position += len(taken)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: numbers only, to be written as JSON."""
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed, "samples": len(self._samples)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; it must come from a loader of as many samples and the same seed, else `DataError`."""
        mine = self.state_dict()
        for name in ("samples", "seed"):
            if state[name] != mine[name]:
                raise DataError(
                    f"the saved position in the data was for {name} = {state[name]}, here it is {mine[name]}; "
                    "resume with the data and the seed of the run that saved it"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self._samples)))
        random.Random(f"loader-{self._seed}-{self._epoch}").shuffle(order)
        return order

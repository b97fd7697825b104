"""Metrics of the staleness of the tokens of a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlframework.interfaces.generation import WeightSpan
from rlframework.rollout.tickets import Settled


class StepStaleness:
    """Counts the sampled tokens of training step `step` by staleness: the steps that their weights were behind."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._tokens: Counter[int] = Counter()
        self._mixed = self._groups = 0

    def add(
        self,
        settled: Sequence[Settled[Any, Any]],
        step_of: Mapping[int, int],
        spans: Callable[[Any], Iterable[WeightSpan]],
    ) -> None:
        """Count the groups that have not failed. `step_of`: the training step of a version in `spans(group)`."""
        for each in settled:
            if each.failed:
                continue
            own: Counter[int] = Counter()
            for span in spans(each.group):
                own[self._step - 1 - step_of[span.version]] += span.end - span.start
            self._tokens += own
            self._groups += 1
            self._mixed += len(own) > 1

    def metrics(self) -> dict[str, float]:
        """Return the mean and the maximum over tokens, and the fraction of groups with tokens of several versions."""
        tokens = max(1, self._tokens.total())
        return {
            "async/staleness_mean": sum(stale * count for stale, count in self._tokens.items()) / tokens,
            "async/staleness_max": float(max(self._tokens, default=0)),
            "async/mixed_version_groups": self._mixed / max(1, self._groups),
        }

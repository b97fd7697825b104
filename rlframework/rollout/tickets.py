"""Tickets of the ledger of asynchronous training, their results, and what is logged and measured of these."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from rlframework.interfaces.generation import WeightSpan

P = TypeVar("P")
"""A prompt as the ledger keeps it, a JSON value such as the number of a row."""
G = TypeVar("G")
"""A finished group, of which the ledger keeps no copy in a checkpoint."""


@dataclass(frozen=True)
class Ticket(Generic[P]):
    """The right to generate a group for place `slot` of training step `step`, both fixed at admission.

    `number`: unique in a process. `attempt`: how many tickets of `prompt` have failed before. `version`: the newest
    weights that all engines had at admission, so that no token can be older. `deadline`: the time of the ledger's clock
    at which the ticket fails; None: never.
    """

    number: int
    step: int
    slot: int
    prompt: P
    attempt: int
    version: int
    deadline: float | None = None

    def __str__(self) -> str:
        again = f", attempt {self.attempt + 1}" if self.attempt else ""
        return f"ticket {self.number} (step {self.step}, slot {self.slot}, prompt {self.prompt!r:.80}{again})"


@dataclass(frozen=True)
class Settled(Generic[P, G]):
    """A ticket that was completed with `group`, or has failed for `reason`."""

    ticket: Ticket[P]
    group: G | None
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Whether there is no group to train on."""
        return bool(self.reason)


@dataclass(frozen=True)
class Failed(Generic[P]):
    """A prompt whose ticket has failed. It is admitted again for step `due`, or the first after it."""

    prompt: P
    attempt: int
    due: int


@dataclass(eq=False)
class Slot(Generic[P, G]):
    """A place in a training step. `drawn`: whether it has its prompt."""

    step: int
    index: int
    drawn: bool = False
    prompt: P | None = None
    attempt: int = 0
    state: Literal["planned", "open", "completed", "failed"] = "planned"
    ticket: Ticket[P] | None = None
    group: G | None = None
    reason: str = ""

    def state_dict(self) -> dict[str, Any]:
        """The slot as JSON values. What is not settled as failed is generated again."""
        failed = {"reason": self.reason} if self.state == "failed" else {}
        drawn = {"prompt": self.prompt, "attempt": self.attempt} if self.drawn else {}
        return {"step": self.step, "slot": self.index, **drawn, **failed}


def staleness_metrics(
    step: int,
    settled: Iterable[Settled[Any, Any]],
    step_of: Mapping[int, int],
    spans: Callable[[Any], Iterable[WeightSpan]],
) -> dict[str, float]:
    """Return the mean and the maximum of staleness over sampled tokens, and the fraction of groups of several versions.

    The staleness of a token of `step` is the number of steps that its weights were behind. Groups that have failed are
    not counted. `step_of`: the training step of a version in `spans(group)`.
    """
    groups = list[Counter[int]]()
    for each in settled:
        if not each.failed:
            groups.append(Counter())
            for span in spans(each.group):
                groups[-1][step - 1 - step_of[span.version]] += span.end - span.start
    tokens = sum(groups, Counter[int]())
    return {
        "async/staleness_mean": sum(stale * count for stale, count in tokens.items()) / max(1, tokens.total()),
        "async/staleness_max": float(max(tokens, default=0)),
        "async/mixed_version_groups": sum(len(group) > 1 for group in groups) / max(1, len(groups)),
    }


_LOG = logging.getLogger(__name__)
_SHOWN = 3
"""Failures of a step that are logged one by one."""


class FailureLog:
    """Logs what fails in each step, in at most four lines, however many groups there are."""

    def __init__(self) -> None:
        self._failed: Counter[int] = Counter()

    def add(self, step: int, message: str) -> None:
        """Log `message`, unless several of `step` have been logged already."""
        self._failed[step] += 1
        if self._failed[step] <= _SHOWN:
            _LOG.warning("%s", message)

    def end(self, step: int) -> None:
        """Log how many failures of `step` were not shown, and forget them."""
        failed = self._failed.pop(step, 0)
        if failed > _SHOWN:
            _LOG.warning("step %d: %d groups failed; %d are not shown", step, failed, failed - _SHOWN)

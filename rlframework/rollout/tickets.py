"""Tickets of the ledger of asynchronous training, and their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

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

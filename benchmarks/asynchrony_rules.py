"""Rules of asynchronous training: which group may begin when, and which groups are trained in which step.

`Tickets` is the ledger of rlframework itself. `CountsByVersion`, `CountsBySync` and `Drops` are the rules of other
frameworks as their documentation describes them, without anything else that these frameworks do. `FirstDone` has no
bound. `DueFirst` waits as little as a rule can that keeps a hard bound and drops nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from rlframework.rollout.ledger import Ledger
from rlframework.rollout.tickets import Ticket

ROWS = 8
"""Rows of a group."""


@dataclass(eq=False, slots=True)
class Group:
    """The completions of a prompt. `started`: the version of the weights at its first token."""

    number: int
    started: int
    rows: int = ROWS
    ticket: Ticket[int] | None = None
    dropped: bool = False


class Rule(ABC):
    """Says when a group may begin, and which groups are trained in which step. Its `version` is that of the engines."""

    version = 0

    def __init__(self, groups: int, bound: int, steps: int) -> None:
        """`groups`: of each step. `bound`: the staleness that the rule aims at. `steps`: that are trained at all."""
        self.groups, self.bound = groups, bound
        self.begun = 0

    @abstractmethod
    def begin(self) -> Group | None:
        """Return a group that begins with the current weights, or None if none may begin yet."""

    @abstractmethod
    def complete(self, group: Group) -> None:
        """Note that all rows of a group are complete."""

    @abstractmethod
    def take(self, step: int) -> Sequence[Group] | None:
        """Return the groups of a training step, or None if they are not all there."""

    def publish(self, version: int) -> Sequence[Group]:
        """Note that the engines have other weights; return the groups that are dropped for it."""
        self.version = version
        return ()

    def _new(self) -> Group:
        self.begun += 1
        return Group(self.begun - 1, self.version)


class Tickets(Rule):
    """The ledger of rlframework: a group has its step from the beginning, and a step waits for its groups."""

    def __init__(self, groups: int, bound: int, steps: int) -> None:
        super().__init__(groups, bound, steps)
        more = min(bound, steps) + 1  # so that the engines have work until the last step is trained
        self.ledger: Ledger[int, Group] = Ledger(
            groups=groups, max_staleness=min(bound, steps), last_step=steps + more, clock=lambda: 0.0
        )
        self._left = [groups] * (steps + more + 1)

    def begin(self) -> Group | None:
        ticket = self.ledger.admit(lambda step: self.begun)
        if ticket is None:
            return None
        group = self._new()
        group.ticket = ticket
        return group

    def complete(self, group: Group) -> None:
        assert group.ticket is not None
        self.ledger.complete(group.ticket, group, (group.started, self.version))
        self._left[group.ticket.step] -= 1

    def take(self, step: int) -> Sequence[Group] | None:
        if self._left[step]:
            return None
        return [each.group for each in self.ledger.take(step) or () if each.group is not None]

    def publish(self, version: int) -> Sequence[Group]:
        self.ledger.published(version)
        return super().publish(version)


class FirstDone(Rule):
    """Groups are trained in the order in which they are complete, and begin without limit."""

    def __init__(self, groups: int, bound: int, steps: int) -> None:
        super().__init__(groups, bound, steps)
        self.done: deque[Group] = deque()
        self.taken = 0

    def begin(self) -> Group | None:
        return self._new()

    def complete(self, group: Group) -> None:
        self.done.append(group)

    def take(self, step: int) -> Sequence[Group] | None:
        if len(self.done) < self.groups:
            return None
        self.taken += self.groups
        return [self.done.popleft() for _ in range(self.groups)]


class CountsByVersion(FirstDone):
    """AReaL's rule: the groups begun so far are at most those that are trained up to version + bound + 1."""

    def begin(self) -> Group | None:
        return self._new() if self.begun < (self.version + self.bound + 1) * self.groups else None


class CountsBySync(FirstDone):
    """verl's rule: between two refits, groups in progress, waiting and new are at most (1 + bound) steps' worth."""

    def __init__(self, groups: int, bound: int, steps: int) -> None:
        super().__init__(groups, bound, steps)
        self._counted = 0

    def begin(self) -> Group | None:
        if self._counted >= (1 + self.bound) * self.groups:
            return None
        self._counted += 1
        return self._new()

    def publish(self, version: int) -> Sequence[Group]:
        self._counted = self.begun - self.taken
        return super().publish(version)


class Drops(FirstDone):
    """prime-rl's rule: engines are kept full, and groups that would be too stale in the next step are dropped.

    Nothing begins while the groups of a whole step wait to be trained.
    """

    def __init__(self, groups: int, bound: int, steps: int) -> None:
        super().__init__(groups, bound, steps)
        self._running: dict[int, Group] = {}

    def begin(self) -> Group | None:
        if len(self.done) >= self.groups:
            return None
        group = self._new()
        self._running[group.number] = group
        return group

    def complete(self, group: Group) -> None:
        del self._running[group.number]
        super().complete(group)

    def publish(self, version: int) -> Sequence[Group]:
        super().publish(version)
        late = [group for group in (*self._running.values(), *self.done) if group.started < version - self.bound]
        for group in late:
            self._running.pop(group.number, None)
        self.done = deque(group for group in self.done if group.started >= version - self.bound)
        return late


class DueFirst(CountsByVersion):
    """A step takes what is complete, the stalest first, and waits for groups only if they would be too stale later."""

    def __init__(self, groups: int, bound: int, steps: int) -> None:
        super().__init__(groups, bound, steps)
        self._open: Counter[int] = Counter()  # groups in progress, by the version with which they began

    def begin(self) -> Group | None:
        if (group := super().begin()) is not None:
            self._open[group.started] += 1
        return group

    def complete(self, group: Group) -> None:
        self._open[group.started] -= 1
        super().complete(group)

    def take(self, step: int) -> Sequence[Group] | None:
        if any(count and started < step - self.bound for started, count in self._open.items()):
            return None
        self.done = deque(sorted(self.done, key=lambda group: group.started))
        return super().take(step)

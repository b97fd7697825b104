"""The ledger of asynchronous training: which prompt is generated for which training step, and when that may begin.

Version `v` is the weights after training step `v`, so a synchronous run samples step `s` with version `s - 1`. The
staleness of a token of step `s` sampled with version `v` is `s - 1 - v`. A ticket is admitted for step `s` only if all
engines have version `s - 1 - max_staleness` or a newer one, and weights never get older: so no token is staler than
`max_staleness`, and none has to be dropped for it.

The bound is no target: groups are admitted `lead` steps in advance of the one that the trainer takes next, from 1 up to
`max_staleness`, as few as keep the trainer busy. When it asks for a step, with the weights that are published,

1. one more, if that step was begun in advance and is not complete: it began too late;
2. one less, if it and the step after it are complete, in two steps in succession.

It cannot stop for ever, because the step that the trainer takes next may be admitted with any lead. It does not swing
either while the steps of the trainer take T and those of the engines G, from admission to completion. A step has the
time of `lead` steps, the one after it had one less when it is looked at: so 1. happens if G > lead * T, and 2. only if
G <= (lead - 1) * T, when the smaller lead is enough.

What is trained does not depend on time, nor on the lead. Slots are filled in a fixed order, in which each step takes
first the prompts that have failed and are due, then the next of the data. A prompt that fails in step `s` is due at
step `s + max_staleness + 1`, the first one that nothing was admitted for before step `s` was settled. The only
influence of time is which tickets reach their deadline.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic

from rlframework.base.errors import DataError, LedgerError
from rlframework.rollout.tickets import Failed, G, P, Settled, Slot, Ticket

_EARLY = 2
"""Steps in succession after which what is complete too early is begun later."""


class Ledger(Generic[P, G]):
    """Bookkeeping of tickets, without threads. Calls are made one at a time.

    `completed` groups wait until their step is taken. Counters: `admitted`, `trained` and `failed` tickets, and
    `given_up` prompts, which have failed `attempts` times.
    """

    def __init__(
        self,
        *,
        groups: int,
        max_staleness: int,
        last_step: int,
        attempts: int = 3,
        deadline: float | None = None,
        clock: Callable[[], float],
        version: int = 0,
    ) -> None:
        """Begin with weights of `version`, after that training step.

        `groups`: of each step. `last_step`: nothing is admitted for later ones. `attempts`: tickets that a prompt gets
        before it is given up. `deadline`: seconds of `clock` from the admission of a ticket to its failure.
        """
        self._groups, self._max_staleness, self._last_step = groups, max_staleness, last_step
        self._attempts, self._deadline, self._clock = attempts, deadline, clock
        self.version = version
        """The weights that all engines have at least."""
        self.taken = version
        """The last step that was taken to train on."""
        self.lead = min(1, max_staleness)
        """The steps in advance of the trainer's that groups are admitted for."""
        self._early = 0
        self.admitted = self.trained = self.failed = self.given_up = 0
        self._steps: dict[int, list[Slot[P, G]]] = {}
        self._unsettled: dict[int, int] = {}
        """The slots of each step that are planned or open."""
        self._queue: deque[Slot[P, G]] = deque()
        self._waiting: deque[Failed[P]] = deque()
        self._open: dict[int, Slot[P, G]] = {}
        self._planned = version
        self._number = 0
        self._plan()

    def start_after(self, step: int) -> None:
        """Begin after training step `step`, as if there had been no tickets before."""
        if self.admitted or self.taken >= step:
            raise LedgerError(f"a ledger with {self.admitted} tickets after step {self.taken} cannot start at {step}")
        self.version = self.taken = self._planned = step
        self._steps, self._unsettled, self._queue = {}, {}, deque()
        self._plan()

    # -- admission -----------------------------------------------------------------------------------------------------

    def admit(self, draw: Callable[[int], P]) -> Ticket[P] | None:
        """Return the next ticket; None while it is too early for it, or if there are no more.

        `draw(step)` returns the next prompt of the data, for `step`. It is called when a slot takes no failed prompt.
        """
        if not self._queue or self._queue[0].step > self.version + 1 + self.lead:
            return None
        slot = self._queue.popleft()
        self._draw(slot, draw)
        deadline = None if self._deadline is None else self._clock() + self._deadline
        ticket = self._ticket(slot, deadline)
        self.admitted += 1
        slot.state = "open"
        self._open[ticket.number] = slot
        return ticket

    def _ticket(self, slot: Slot[P, G], deadline: float | None = None) -> Ticket[P]:
        prompt: Any = slot.prompt  # may be None itself
        slot.ticket = Ticket(self._number, slot.step, slot.index, prompt, slot.attempt, self.version, deadline)
        self._number += 1
        return slot.ticket

    def extend(self, step: int, draw: Callable[[int], P]) -> None:
        """Open as many slots again in `step`, all of whose tickets are settled, and which is the next to be taken.

        Their prompts follow all that were planned before, so that it does not matter when this is called.
        """
        if self.settled(step) is None:
            raise LedgerError(f"step {step} cannot be extended: {self._why_not(step)}")
        for slot in self._queue:
            self._draw(slot, draw)
        slots = self._steps[step]
        more = [Slot[P, G](step, len(slots) + index) for index in range(self._groups)]
        for slot in more:
            self._draw(slot, draw)
        slots += more
        self._unsettled[step] += len(more)
        self._queue.extendleft(reversed(more))

    def _plan(self) -> None:
        """Add the slots of all steps that may be admitted after the one that was taken last is published."""
        while self._planned < min(self.taken + 1 + self._max_staleness, self._last_step):
            self._planned += 1
            slots = [Slot[P, G](self._planned, index) for index in range(self._groups)]
            self._steps[self._planned] = slots
            self._unsettled[self._planned] = len(slots)
            self._queue += slots

    def _draw(self, slot: Slot[P, G], draw: Callable[[int], P]) -> None:
        if slot.drawn:
            return
        if self._waiting and self._waiting[0].due <= slot.step:
            again = self._waiting.popleft()
            slot.prompt, slot.attempt = again.prompt, again.attempt
        else:
            slot.prompt = draw(slot.step)
        slot.drawn = True

    # -- settling ------------------------------------------------------------------------------------------------------

    def complete(self, ticket: Ticket[P], group: G, versions: Collection[int]) -> bool:
        """Settle `ticket` with `group`, whose tokens were sampled with `versions`; False if it has failed meanwhile.

        Raises `LedgerError`, naming the ticket, for one that is not open, and for tokens beyond the bound.
        """
        if (slot := self._find(ticket)) is None:
            return False
        for version in versions:
            if not ticket.version <= version < ticket.step:
                raise LedgerError(
                    f"{ticket} has tokens of version {version}; it was admitted with version {ticket.version}, and its "
                    f"step trains version {ticket.step - 1}: an engine did not get the weights that were published"
                )
        slot.state, slot.group = "completed", group
        self._unsettled[slot.step] -= 1
        del self._open[ticket.number]
        return True

    def fail(self, ticket: Ticket[P], reason: str) -> bool:
        """Settle `ticket` without a group; False if it has failed before. Its prompt gets another ticket later."""
        if (slot := self._find(ticket)) is None:
            return False
        slot.state, slot.reason = "failed", reason or "no reason was given"
        self._unsettled[slot.step] -= 1
        self.failed += 1
        del self._open[ticket.number]
        return True

    def expire(self) -> list[Ticket[P]]:
        """Fail the tickets whose deadline has passed, and return them."""
        now, late = self._clock(), list[Ticket[P]]()
        for slot in self._open.values():  # in the order of their deadlines
            assert slot.ticket is not None
            if slot.ticket.deadline is None or slot.ticket.deadline > now:
                break
            late.append(slot.ticket)
        for ticket in late:
            self.fail(ticket, f"it was not complete {self._deadline:g} seconds after its admission")
        return late

    def _find(self, ticket: Ticket[P]) -> Slot[P, G] | None:
        """Return the slot of an open ticket, None if it has failed or its step is over; else raise `LedgerError`."""
        if (slot := self._open.get(ticket.number)) is not None and slot.ticket == ticket:
            return slot
        slots = self._steps.get(ticket.step, [])
        own = slots[ticket.slot] if ticket.slot < len(slots) else None
        failed = own is not None and own.ticket == ticket and own.state == "failed"
        if failed or ticket.step <= self.taken:
            return None
        raise LedgerError(f"{ticket} is not open: it was completed before, or is of another ledger")

    # -- training ------------------------------------------------------------------------------------------------------

    def settled(self, step: int) -> list[Settled[P, G]] | None:
        """Return what became of the tickets of `step`, by slot; None until all are settled.

        Raises `LedgerError` unless `step` is the one to take next.
        """
        if step != self.taken + 1 or step not in self._steps:
            raise LedgerError(f"step {step} cannot be taken: {self._why_not(step)}")
        if self._unsettled[step]:
            return None
        slots = self._steps[step]
        return [Settled(slot.ticket, slot.group, slot.reason) for slot in slots if slot.ticket is not None]

    def take(self, step: int) -> list[Settled[P, G]] | None:
        """Return like `settled`, and forget the groups; prompts that have failed are due in a later step."""
        if (found := self.settled(step)) is None:
            return None
        for each in found:
            if not each.failed:
                self.trained += 1
            elif each.ticket.attempt + 1 < self._attempts:
                due = step + self._max_staleness + 1
                self._waiting.append(Failed(each.ticket.prompt, each.ticket.attempt + 1, due))
            else:
                self.given_up += 1
        del self._steps[step], self._unsettled[step]
        self.taken = step
        self._plan()
        return found

    def published(self, version: int) -> None:
        """Note that all engines have the weights of `version`, those after a step that was taken, or newer ones."""
        if not self.version <= version <= self.taken:
            raise LedgerError(
                f"version {version} cannot be published: the engines have version {self.version}, and step "
                f"{self.taken} was the last to be trained"
            )
        if version > self.version:
            self._adapt_lead(version + 1)
        self.version = version

    def _adapt_lead(self, step: int) -> None:
        """Change the lead by what is complete when the trainer asks for `step`: see the head of the module."""
        slots = self._steps.get(step, [])
        complete = not self._unsettled.get(step, 0)
        self._early = self._early + 1 if complete and not self._unsettled.get(step + 1, 1) else 0
        if not complete and slots[0].ticket is not None:
            self.lead = min(self.lead + 1, self._max_staleness)
        elif self._early == _EARLY:
            self.lead, self._early = max(self.lead - 1, min(1, self._max_staleness)), 0

    def awaited(self, step: int) -> list[Ticket[P]]:
        """Return the open tickets of `step`."""
        return [slot.ticket for slot in self._open.values() if slot.step == step and slot.ticket is not None]

    def _why_not(self, step: int) -> str:
        if step == self.taken + 1 and step in self._steps:
            return f"{len(self.awaited(step))} tickets are open ({', '.join(map(str, self.awaited(step)[:3]))})"
        return f"step {self.taken + 1} is next, and {self._last_step} is the last"

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values, if prompts are. Save what `draw` depends on at the same time.

        Tickets that are open or completed, but not trained, are planned again by `load_state_dict`: for the same steps
        and slots, with the same prompts.
        """
        slots = [slot for of_step in self._steps.values() for slot in of_step]
        untrained = sum(slot.state in ("open", "completed") for slot in slots)
        return {
            "groups": self._groups,
            "version": self.version,
            "taken": self.taken,
            "planned": self._planned,
            "admitted": self.admitted - untrained,
            "trained": self.trained,
            "failed": self.failed,
            "given_up": self.given_up,
            "slots": [slot.state_dict() for slot in slots],
            "waiting": [vars(failed) for failed in self._waiting],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; `max_staleness`, deadlines and the last step may be other ones.

        Raises `DataError` for another number of groups.
        """
        if state["groups"] != self._groups:
            raise DataError(
                f"the checkpoint has tickets for {state['groups']} prompts a step, but algorithm.prompts_per_step is "
                f"{self._groups}; resume with {state['groups']}"
            )
        for name in ("version", "taken", "admitted", "trained", "failed", "given_up"):
            setattr(self, name, state[name])
        self._steps, self._open, self._planned = {}, {}, state["planned"]
        self._waiting = deque(Failed(**failed) for failed in state["waiting"])
        for saved in state["slots"]:
            slot = Slot[P, G](saved["step"], saved["slot"])
            self._steps.setdefault(slot.step, []).append(slot)
            if "prompt" in saved:
                slot.drawn, slot.prompt, slot.attempt = True, saved["prompt"], saved["attempt"]
            if "reason" in saved:
                slot.state, slot.reason = "failed", saved["reason"]
                self._ticket(slot)
        slots = (slot for of_step in self._steps.values() for slot in of_step)
        self._queue = deque(slot for slot in slots if slot.state == "planned")
        planned = Counter(slot.step for slot in self._queue)
        self._unsettled = {step: planned[step] for step in self._steps}
        self._plan()

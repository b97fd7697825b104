"""The guarantees of asynchronous training, on random schedules in virtual time, and its log of failed groups."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from broken_ledgers import BROKEN, TrustsEngines
from ledger_worlds import Facts, Schedule, World, random_schedule, synchronous

from rlframework.base.errors import DataError, LedgerError
from rlframework.rollout.ledger import Ledger
from rlframework.rollout.tickets import FailureLog

SCHEDULES = 10_000
SAMPLE = 1_000
"""Number of schedules that run without `--thorough`."""


def check(world: World) -> None:
    """The guarantees that hold in every schedule."""
    schedule, facts, ledger = world.schedule, world.facts, world.ledger
    for group in facts.trained:
        oldest, newest = min(group.versions), max(group.versions)
        assert group.step - 1 - schedule.max_staleness <= oldest <= newest <= group.step - 1
        assert list(group.versions) == sorted(group.versions)
    places = [(group.step, group.slot) for group in facts.trained]
    places += [(step, slot) for step, slot, _, _ in facts.failed]
    assert len(places) == len(set(places))
    assert {step for step, _ in places} == set(range(1, schedule.steps + 1))
    # tickets: each was trained or has failed
    assert ledger.admitted == ledger.trained + ledger.failed == len(places)
    assert (ledger.trained, ledger.failed) == (len(facts.trained), len(facts.failed))
    # prompts: each that was drawn is trained once, or given up after its attempts, or is due after the last step
    assert max(Counter(group.prompt for group in facts.trained).values(), default=0) <= 1
    failures = Counter(prompt for _, _, prompt, _ in facts.failed)
    trained = {group.prompt: group.attempt for group in facts.trained}
    waiting = {failed["prompt"]: failed["attempt"] for failed in ledger.state_dict()["waiting"]}
    ends = trained | waiting | dict.fromkeys(facts.given_up, schedule.attempts)
    assert ends.keys() == set(range(facts.drawn))
    assert len(ends) == len(trained) + len(waiting) + len(facts.given_up)
    assert all(failures[prompt] == attempts for prompt, attempts in ends.items())
    assert ledger.given_up == len(facts.given_up)


def batches(facts: Facts) -> list[tuple[int, int, int, int]]:
    """The trained groups, without its tokens, which depend on the versions."""
    return [(group.step, group.slot, group.prompt, group.attempt) for group in facts.trained]


@pytest.mark.slow
def test_random_schedules(request: pytest.FixtureRequest) -> None:
    """Durations, failures, deadlines, publications, crashes and resumes."""
    count = SCHEDULES if request.config.getoption("thorough") else SAMPLE
    seen: Counter[str] = Counter()
    for number in range(count):
        world = World(random_schedule(number)).run()
        try:
            check(world)
        except AssertionError as error:
            raise AssertionError(f"schedule {number}: {world.schedule}") from error
        seen["stale"] += any(group.versions[0] < group.step - 1 for group in world.facts.trained)
        seen["mixed"] += any(group.versions[0] < group.versions[-1] for group in world.facts.trained)
        seen["failed"] += bool(world.facts.failed)
        seen["given up"] += bool(world.facts.given_up)
        seen["again"] += any(group.attempt for group in world.facts.trained)
        seen["crashed"] += any(crash <= world.events for crash in world.schedule.crashes)
        seen["extended"] += any(group.slot >= world.schedule.groups for group in world.facts.trained)
    assert all(seen[name] >= count // 50 for name in ("stale", "mixed", "failed", "again", "crashed", "extended")), seen
    assert seen["given up"]


@pytest.mark.parametrize("broken", BROKEN)
def test_the_guarantees_detect_a_broken_ledger(broken: type[Ledger[int, Any]]) -> None:
    """In at least one of the schedules, which have failures and crashes; a sound ledger keeps them in all of these."""
    stuck = broken is TrustsEngines
    crashes = [frozenset()] if stuck else [frozenset({event}) for event in range(10, 60, 5)]
    schedules = [
        Schedule(world=7, time=3, max_staleness=1, failing=0 if stuck else 20, crashes=at, crash_at_once=True)
        for at in crashes
    ]
    for schedule in schedules:
        check(World(schedule).run())

    def detects(schedule: Schedule) -> bool:
        try:
            check(World(replace(schedule, stuck=stuck), ledger=broken).run())
        except (AssertionError, LedgerError):
            return True
        return False

    assert any(map(detects, schedules))


def test_weights_that_an_engine_did_not_get_end_the_run() -> None:
    with pytest.raises(LedgerError, match=r"tokens of version 0; it was admitted with .*did not get the weights"):
        World(Schedule(world=7, time=3, max_staleness=1, stuck=True)).run()


@pytest.mark.parametrize("number", range(20))
def test_without_staleness_it_is_the_synchronous_run_bit_for_bit(number: int) -> None:
    schedule = Schedule(world=number, time=number + 1, max_staleness=0, groups=1 + number % 4, steps=6)
    world = World(schedule).run()
    assert world.facts == synchronous(schedule)


@pytest.mark.parametrize("number", range(30))
def test_what_is_trained_does_not_depend_on_how_long_things_take(number: int) -> None:
    schedule = replace(random_schedule(number), deadline=None, hanging=0, crashes=frozenset())
    first = World(schedule).run().facts
    for time in range(5):
        slower = replace(schedule, time=time, slowest=50.0, engines=1 + time % 3, most_open=1 + 2 * time)
        other = World(slower).run().facts
        assert batches(other) == batches(first)
        assert (other.drawn, other.failed, other.given_up) == (first.drawn, first.failed, first.given_up)


@pytest.mark.parametrize("at_once", [True, False], ids=["this event", "last checkpoint"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_crash_at_every_event_of_a_schedule(at_once: bool, rounds: int) -> None:
    recorded = Schedule(
        world=11, time=5, max_staleness=2, steps=4, failing=20, rounds=rounds, useful=60, crash_at_once=at_once
    )
    undisturbed = World(recorded).run()
    check(undisturbed)
    assert undisturbed.events > 40
    assert undisturbed.facts.failed
    for event in range(1, undisturbed.events + 1):
        world = World(replace(recorded, crashes=frozenset({event}))).run()
        check(world)
        assert batches(world.facts) == batches(undisturbed.facts), f"a crash at event {event}"
        assert world.facts.failed == undisturbed.facts.failed


def test_a_ticket_that_hangs_ends_at_its_deadline_and_is_named() -> None:
    now = [0.0]
    ledger = book(max_staleness=1, deadline=10.0, clock=lambda: now[0])
    (first, second), draw = admitted(ledger, 2), iter(range(100, 200))
    ledger.complete(second, "group", [0])
    assert ledger.take(1) is None
    assert ledger.awaited(1) == [first]
    assert str(first) == "ticket 0 (step 1, slot 0, prompt 0)"
    now[0] = 9.9
    assert (first.deadline, ledger.expire()) == (10.0, [])
    now[0] = 10.0
    assert first in ledger.expire()
    assert ledger.complete(first, "too late", [0]) is False
    taken = ledger.take(1)
    assert taken is not None
    assert [each.reason for each in taken] == ["it was not complete 10 seconds after its admission", ""]
    ledger.published(1)
    # the prompt of step 1 is due at step 3, the first that nothing was admitted for before step 1 was settled
    again = [ledger.admit(lambda step: next(draw)) for _ in range(2)]
    assert [(t.step, t.slot, t.prompt, t.attempt) for t in again if t] == [(3, 0, 0, 1), (3, 1, 100, 0)]
    assert str(again[0]) == "ticket 4 (step 3, slot 0, prompt 0, attempt 2)"


def book(**options: Any) -> Ledger[int, str]:
    return Ledger(**{"groups": 2, "max_staleness": 1, "last_step": 9, "clock": lambda: 0.0, **options})


def admitted(ledger: Ledger[int, str], count: int) -> list[Any]:
    """Admit all tickets that can be, and return the first `count`."""
    numbers = iter(range(1000))
    tickets = []
    while (ticket := ledger.admit(lambda step: next(numbers))) is not None:
        tickets.append(ticket)
    return tickets[:count]


def paced(durations: list[float], max_staleness: int) -> tuple[list[int], list[float]]:
    """Train steps that take the trainer a second each; the groups of step `s` take `durations[s - 1]` seconds.

    Returns how stale each step's oldest group is at its admission, and how long the trainer waits for the step.
    """
    ledger, now = book(max_staleness=max_staleness, last_step=len(durations)), 0.0
    ends, stale, waited = list[tuple[float, Any]](), list[int](), list[float]()

    def complete(until: float) -> None:
        for end, ticket in sorted((each for each in ends if each[0] <= until), key=lambda each: each[0]):
            ledger.complete(ticket, "group", [ticket.version])
            ends.remove((end, ticket))

    for step in range(1, len(durations) + 1):
        ends += [(now + durations[ticket.step - 1], ticket) for ticket in admitted(ledger, 99)]
        asked = now
        while ledger.settled(step) is None:
            now = min(end for end, _ in ends)  # fails if nothing was admitted that the step waits for
            complete(now)
        taken = ledger.take(step) or []
        stale.append(max(step - 1 - each.ticket.version for each in taken))
        waited.append(now - asked)
        now += 1.0
        complete(now)
        ledger.published(step)
    return stale, waited


@pytest.mark.parametrize(
    ("duration", "max_staleness", "needed"),
    [(0.5, 4, 1), (1.0, 1, 1), (1.5, 4, 2), (2.5, 4, 3), (2.5, 3, 3), (3.5, 2, 2), (0.5, 0, 0)],
)
def test_groups_are_admitted_as_late_as_keeps_the_trainer_busy(
    duration: float, max_staleness: int, needed: int
) -> None:
    stale, waited = paced([duration] * 30, max_staleness)
    assert stale[-15:] == [needed] * 15
    assert max(stale) == needed
    assert (max(waited[-15:]) == 0.0) == (duration <= needed)


def test_groups_are_admitted_later_again_when_they_take_less_time() -> None:
    stale, waited = paced([2.5] * 15 + [0.5] * 15, 4)
    assert (max(stale), stale[-5:]) == (3, [1] * 5)
    assert max(waited[8:]) == 0.0


def test_an_extended_step_goes_first_and_its_prompts_are_drawn_last() -> None:
    ledger, numbers = book(), iter(range(99))
    tickets = [ledger.admit(lambda step: next(numbers)) for _ in range(2)]
    for ticket in tickets:
        assert ticket is not None
        ledger.complete(ticket, "group", [0])
    ledger.extend(1, lambda step: next(numbers))
    after = [ledger.admit(lambda step: next(numbers)) for _ in range(4)]
    assert [(ticket.step, ticket.slot, ticket.prompt) for ticket in after if ticket] == [
        (1, 2, 4), (1, 3, 5), (2, 0, 2), (2, 1, 3),
    ]  # fmt: skip
    assert ledger.take(1) is None


def test_errors_name_the_ticket() -> None:
    ledger = book()
    first, second, third, _ = admitted(ledger, 4)
    with pytest.raises(LedgerError, match=r"ticket 0 \(step 1, slot 0, prompt 0\) has tokens of version 1; it was"):
        ledger.complete(first, "group", [0, 1])
    ledger.complete(first, "group", [0])
    with pytest.raises(LedgerError, match=r"ticket 0 \(step 1, slot 0, prompt 0\) is not open: it was completed"):
        ledger.complete(first, "group", [0])
    with pytest.raises(LedgerError, match=r"step 2 cannot be taken: step 1 is next, and 9 is the last"):
        ledger.take(2)
    with pytest.raises(LedgerError, match=r"step 1 cannot be extended: 1 tickets are open \(ticket 1 \(step 1"):
        ledger.extend(1, lambda step: 7)
    with pytest.raises(LedgerError, match=r"version 1 cannot be published: the engines have version 0, and step 0 was"):
        ledger.published(1)
    assert ledger.fail(second, "it broke")
    assert not ledger.fail(second, "again")
    ledger.take(1)
    ledger.published(1)
    with pytest.raises(LedgerError, match="has tokens of version -1; it was admitted with version 0"):
        ledger.complete(third, "group", [-1])


def test_the_bound_may_change_on_resume_and_the_number_of_groups_may_not() -> None:
    ledger = book(max_staleness=2)
    for ticket in admitted(ledger, 2):
        ledger.complete(ticket, "group", [0])
    ledger.take(1)
    ledger.published(1)
    admitted(ledger, 9)
    state = json.loads(json.dumps(ledger.state_dict()))
    narrow = book(max_staleness=0)
    narrow.load_state_dict(state)
    assert [(ticket.step, ticket.prompt) for ticket in admitted(narrow, 9)] == [(2, 2), (2, 3)]
    wide = book(max_staleness=3)
    wide.load_state_dict(state)
    assert [ticket.step for ticket in admitted(wide, 99)] == [2, 2, 3, 3]
    with pytest.raises(DataError, match=r"has tickets for 2 prompts a step, but algorithm.prompts_per_step is 3"):
        book(groups=3).load_state_dict(state)


def test_a_ledger_begins_after_a_synchronous_run() -> None:
    ledger: Ledger[int, str] = Ledger(groups=2, max_staleness=1, last_step=6, clock=lambda: 0.0)
    ledger.start_after(4)
    prompts = iter(range(9))
    tickets = [ledger.admit(lambda step: next(prompts)) for _ in range(5)]
    assert [(ticket.step, ticket.version) for ticket in tickets[:4] if ticket] == [(5, 4), (5, 4), (6, 4), (6, 4)]
    assert tickets[4] is None
    with pytest.raises(LedgerError, match="a ledger with 4 tickets after step 4 cannot start at 5"):
        ledger.start_after(5)


def test_the_first_failures_of_a_step_are_logged_and_the_others_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for number in range(4000):
        log.add(7, f"ticket {number} failed")
    log.add(8, "ticket 4000 failed")
    log.end(7)
    log.end(8)
    shown = ["ticket 0 failed", "ticket 1 failed", "ticket 2 failed", "ticket 4000 failed"]
    assert caplog.messages == [*shown, "step 7: 4000 groups failed; 3997 are not shown"]


def test_a_step_begins_anew_after_its_end(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for _ in range(2):
        for number in range(3):
            log.add(1, str(number))
        log.end(1)
    assert caplog.messages == ["0", "1", "2"] * 2

"""The timeline of a run for the page: what the trainer, the engines and refits did in the last steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypedDict

from rlframework.observers.runs import Run, TimelineRow
from rlframework.observers.timeline import ENGINES, ENVIRONMENT, LITTLE, REFITS, TRAINER

STEPS = 10
"""Maximum number of steps that are drawn: the last ones."""


class Lane(TypedDict):
    """A part of the run. `spans`: number of the activity, start, end in seconds; `busy`: fraction of the whole run."""

    name: str
    busy: float
    spans: list[tuple[int, float, float]]


class TimelineData(TypedDict):
    """The last steps, with their starts, in a time of `seconds`; `shares` are the trainer's, of the whole run."""

    steps: list[tuple[int, float]]
    seconds: float
    activities: list[str]
    lanes: list[Lane]
    shares: list[tuple[str, float]]
    hidden: int
    hint: str


def timeline_of(run: Run) -> TimelineData | None:
    """Return the timeline of `run`; None without a recording.

    Where engines have processes of their own, and are refitted, the trainer waits in its phase `generate`.
    """
    rows = run.timeline
    if not rows:
        return None
    total = sum(row.seconds for row in rows) or 1.0
    names = {lane for row in rows for lane in row.lanes}
    apart = REFITS in names
    engines = sorted(names - {TRAINER, REFITS, ENVIRONMENT}, key=lambda name: (len(name), name))
    spent = _spent(rows, apart)
    busy = {name: sum(row.busy.get(name, 0.0) for row in rows) / total for name in names | {TRAINER}}
    waits = spent.get("wait", 0.0) / total
    busy[TRAINER] -= waits
    shown = rows[-STEPS:]
    *starts, end = accumulate((row.seconds for row in shown), initial=0.0)
    lanes = [TRAINER, *engines[:ENGINES], *sorted(names & {REFITS, ENVIRONMENT})]
    drawn = {lane: _spans(lane, list(zip(starts, shown, strict=True)), apart) for lane in lanes}
    activities = list(dict.fromkeys([*spent, *(span[0] for spans in drawn.values() for span in spans)]))
    count = max([len(engines), *(row.engines.count for row in rows if row.engines is not None)])
    idle = 1.0 - sum(row.engine_seconds for row in rows) / total / max(1, count)
    return TimelineData(
        steps=[(row.step, round(start, 3)) for start, row in zip(starts, shown, strict=True)],
        seconds=round(end, 3),
        activities=activities,
        lanes=[
            Lane(
                name=lane,
                busy=round(busy[lane], 4),
                spans=[(activities.index(name), begun, ended) for name, begun, ended in spans],
            )
            for lane, spans in drawn.items()
        ],
        shares=[(name, round(seconds / total, 4)) for name, seconds in spent.items()],
        hidden=max(0, count - ENGINES),
        hint=hint(waits, idle, "async/staleness_max" in run.names) if apart and engines else "",
    )


def hint(waits: float, idle: float, asynchronous: bool) -> str:
    """Say what would help where the trainer `waits` for and the engines are `idle` in these fractions of the time."""
    found = f"The trainer waits in {waits:.0%} of the time, and the engines are idle in {idle:.0%}. "
    if not asynchronous:
        return found + "They take turns; algorithm.async generates while the policy is trained."
    if waits >= LITTLE and idle >= LITTLE:
        return (
            f"{found}Both wait for each other: a larger algorithm.async.max_staleness, or more prompts_per_step. Or "
            "both wait for the code of agents, environments and rewards."
        )
    if waits >= LITTLE:
        return found + "More engines would help: generation.workers.num_workers."
    if idle >= LITTLE:
        return found + "More workers of the trainer would help, or fewer engines would do."
    return found + "Both are busy."


def _spent(rows: Sequence[TimelineRow], apart: bool) -> dict[str, float]:
    """The seconds of each activity of the trainer."""
    spent: dict[str, float] = {}
    for row in rows:
        for activity, begun, ended in row.lanes.get(TRAINER, ()):
            name = _activity(TRAINER, activity, apart)
            spent[name] = spent.get(name, 0.0) + ended - begun
    return spent


def _spans(lane: str, rows: Sequence[tuple[float, TimelineRow]], apart: bool) -> list[tuple[str, float, float]]:
    """The spans of a lane, in seconds from the first of the steps with these starts."""
    return [
        (_activity(lane, activity, apart), round(start + begun, 3), round(start + ended, 3))
        for start, row in rows
        for activity, begun, ended in row.lanes.get(lane, ())
    ]


def _activity(lane: str, activity: str, apart: bool) -> str:
    return "wait" if apart and lane == TRAINER and activity == "generate" else activity

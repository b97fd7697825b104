"""Scale and seed of the attacks: a short form in `make test`, the full one in `make soak`, which sets `SOAK_FILE`.

`SOAK_FILE`: where each full attack appends a line of JSON when it begins and another one when it has ended, with its
outcome, seconds and figures. `SOAK_SEED`: repeats a run. Without `--thorough` the seed is 0: each `make test` of a
commit tries the same inputs.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Soak:
    """The scale of one attack. `figures`: the numbers that it reports, such as the inputs that it tried."""

    full: bool
    seed: int
    figures: dict[str, Any] = field(default_factory=dict)

    def times(self, short: int, full: int) -> int:
        """Return how many inputs to try."""
        return full if self.full else short

    def random(self) -> random.Random:
        """Return a generator of random numbers that starts at the seed."""
        return random.Random(self.seed)


_REPORT = pytest.StashKey[pytest.TestReport]()
_ERROR = 4000
"""Characters of an error in its line."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the report for `soak`, which ends after the test."""
    report = yield
    if report.when == "call" or not report.passed:
        item.stash[_REPORT] = report
    return report


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> Iterator[Soak]:
    """The scale of this attack; the seed is in the output of a test that fails."""
    file, begun = os.environ.get("SOAK_FILE"), time.monotonic()
    seed = secrets.randbits(32) if request.config.getoption("thorough") else 0
    scale = Soak(bool(file), int(os.environ.get("SOAK_SEED") or seed))
    print(f"SOAK_SEED={scale.seed}")

    def write(outcome: str, seconds: float | None, figures: Mapping[str, Any]) -> None:
        if file:
            of = {**figures, "file": request.path.name, "attack": request.node.name, "seed": scale.seed}
            line = json.dumps({**of, "outcome": outcome, "seconds": seconds})
            with Path(file).open("a") as lines:
                lines.write(line + "\n")

    write("did not end", None, {})  # the line that remains if this process dies
    yield scale
    report = request.node.stash.get(_REPORT, None)
    outcome = "failed" if report is None else report.outcome
    error = {"error": report.longreprtext[-_ERROR:] if report else "interrupted"} if outcome == "failed" else {}
    write(outcome, round(time.monotonic() - begun, 1), {**scale.figures, **error})

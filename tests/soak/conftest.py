"""Scale and seed of the attacks: a short form in `make test`, the full one in `make soak`, which sets `SOAK_FILE`.

`SOAK_FILE`: where each full attack appends a line of JSON with its name and its figures. `SOAK_SEED`: repeats a run.
"""

from __future__ import annotations

import json
import os
import random
import secrets
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


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> Any:
    """The scale of this attack; the seed is in the output of a test that fails."""
    file = os.environ.get("SOAK_FILE")
    scale = Soak(bool(file), int(os.environ.get("SOAK_SEED") or secrets.randbits(32)))
    print(f"SOAK_SEED={scale.seed}")
    yield scale
    if file:
        with Path(file).open("a") as lines:
            lines.write(json.dumps({"attack": request.node.name, "seed": scale.seed, **scale.figures}) + "\n")

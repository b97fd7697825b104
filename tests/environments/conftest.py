"""A module of reward functions, and environments that use them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from own_reward_runs import REWARDS

from rlframework.config.environments import DatasetConfig
from rlframework.environments.dataset import DatasetEnvironment


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with `own_rewards.py` and rows."""
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"{n}?", "answer": n, "level": str(n)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    return tmp_path


@pytest.fixture
def make():
    """`make(function, **keys)`: an environment with that function of `own_rewards`; shut down afterwards."""
    made = []

    def environment(function: str, **keys: Any) -> DatasetEnvironment:
        path = function if ":" in function else f"own_rewards:{function}"
        made.append(DatasetEnvironment(DatasetConfig(path="rows.jsonl", reward=path, **keys), seed=0))
        return made[-1]

    yield environment
    for environment_ in made:
        environment_.shutdown()

"""Import paths of agents: misspelt names and signatures are found before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlframework.base.errors import ConfigError
from rlframework.plugins.user_defined import load_agent


def test_an_agent_is_checked_when_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agents_for_loading.py").write_text(
        "def solve(sample, session): ...\n"
        "async def more(sample, session, tries=2): ...\n"
        "def one(task): ...\n"
        "def three(sample, session, client): ...\n"
        "class Solver: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("solve", "more"):
        assert load_agent(f"agents_for_loading:{name}").__name__ == name
    for name, problem in {
        "slove": r"has no 'slove'\. Did you mean 'solve'\?",
        "one": r"agents_for_loading\.py, line 3\) cannot be called with a sample and a session.*\(task\)",
        "three": r"cannot be called.*define `async def solve\(sample, session\)`",
        "Solver": r"is not a function",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            load_agent(f"agents_for_loading:{name}")

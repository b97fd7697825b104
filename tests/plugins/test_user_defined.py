"""Import paths of agents: misspelt names and signatures are found before a run starts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

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


def test_a_name_that_no_cell_has_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    with pytest.raises(ConfigError, match=r"has no 'solve'\. Run the cell that defines it first$"):
        load_agent("__main__:solve")
    sys.modules["__main__"].__file__ = "program.py"
    with pytest.raises(ConfigError, match=r"has no 'solve'; objects defined in a script must be moved to a module$"):
        load_agent("__main__:solve")

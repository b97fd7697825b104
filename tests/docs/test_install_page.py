"""The page Install and the Dockerfile name what is in the repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
OF_DEVELOPERS = {"dev", "docs"}


def test_each_extra_is_on_the_page():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    table = PAGE.partition("| extra | for |")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines() for name in re.findall(r"`([\w-]+)`", row.partition(" | ")[0])]
    assert set(listed) == extras.keys() - OF_DEVELOPERS


def test_the_container_has_all_distributions():
    folders = re.findall(r"plugins/\w+", DOCKERFILE)
    assert sorted(folders) == sorted(f"plugins/{path.parent.name}" for path in ROOT.glob("plugins/*/pyproject.toml"))
    assert set(re.findall(r"--build-arg (\w+)=", PAGE)) == set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    assert set(re.findall(r"plugins/\w+", PAGE)) == set(folders)

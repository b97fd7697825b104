"""constraints.txt and constraints-lowest.txt: versions that every pyproject allows, and nothing of this machine."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
EXACT = re.compile(r"([a-z0-9-]+)==([0-9][A-Za-z0-9.!]*)")


def versions(name: str) -> dict[str, str]:
    """The constraints of a file by name; each line is a comment, or one exact version without local part or path."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    matches = [EXACT.fullmatch(line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if not match]
    return {match[1]: match[2] for match in matches if match}


def requirements() -> list[Requirement]:
    """All requirements of core and its plugins, extras too, without those on each other."""
    lists = []
    for path in [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]:
        project = tomllib.loads(path.read_text())["project"]
        lists += [project.get("dependencies", []), *project.get("optional-dependencies", {}).values()]
    found = [Requirement(text) for each in lists for text in each]
    return [each for each in found if not each.name.startswith("rlframework")]


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-lowest.txt"])
def test_every_version_is_within_the_bounds_of_the_requirements(name: str) -> None:
    pinned = versions(name)
    used = [each for each in requirements() if canonicalize_name(each.name) in pinned]
    assert used
    outside = [
        f"{each}: {pinned[canonicalize_name(each.name)]}"
        for each in used
        if not each.specifier.contains(pinned[canonicalize_name(each.name)], prereleases=True)
    ]
    assert outside == []


def test_what_core_requires_has_a_version_and_our_distributions_have_none() -> None:
    pinned = versions("constraints.txt")
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {canonicalize_name(Requirement(text).name) for text in core} <= set(pinned)
    assert not [name for name in pinned if name.startswith("rlframework")]


def test_the_lowest_versions_are_the_lower_bounds() -> None:
    lowest = versions("constraints-lowest.txt")
    core = [
        Requirement(text) for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    ]
    bounds = {each.name: Version(spec.version) for each in core for spec in each.specifier if spec.operator == ">="}
    assert set(lowest) == {"torch", "transformers"}
    assert {name: Version(version) for name, version in lowest.items()} == {name: bounds[name] for name in lowest}


class Installed:
    """A distribution as `importlib.metadata` describes it."""

    def __init__(self, name: str, version: str, direct_url: str | None = None) -> None:
        self.name, self.version, self._direct_url = name, version, direct_url

    def read_text(self, name: str) -> str | None:
        return self._direct_url if name == "direct_url.json" else None


def test_folders_local_parts_and_pip_are_left_out_of_the_file() -> None:
    constraints = runpy.run_path(str(ROOT / "tools" / "constraints.py"))["constraints"]
    assert constraints(
        [
            Installed("torch", "2.13.0+cpu"),
            Installed("ours", "1.0", '{"url": "file:///home/me/ours", "dir_info": {"editable": true}}'),
            Installed("Flask_Cors", "5.0", '{"url": "file:///wheels/flask_cors.whl", "archive_info": {}}'),
            Installed("flask-cors", "4.0"),  # behind the other one on the path
            Installed("pip", "25.0"),
        ]
    ) == ["flask-cors==5.0", "torch==2.13.0"]

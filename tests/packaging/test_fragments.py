"""The files of changes/ are fragments that `make changelog` can put into CHANGELOG.md."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
KINDS = {kind["directory"] for kind in SETTINGS["type"]}
NOT_FRAGMENTS = {"README.md", *SETTINGS["ignore"]}


def faults(folder: Path) -> list[str]:
    """One message for each file of `folder` that is no fragment."""
    return [
        f"{path.name}: {fault}"
        for path in sorted(folder.iterdir())
        if path.name not in NOT_FRAGMENTS
        for fault in _faults_of(path)
    ]


def _faults_of(path: Path) -> Iterable[str]:
    match = re.fullmatch(r"[a-z0-9_]+\.([a-z]+)\.md", path.name)
    if match is None or match[1] not in KINDS:
        yield f"name it NAME.KIND.md, in lower case; KIND is one of {', '.join(sorted(KINDS))}"
    text = path.read_text(encoding="utf-8")
    if not text.strip() or text != text.strip() + "\n" or "\n\n" in text:
        yield "write one paragraph and an end of line"
    if text.startswith(("- ", "* ", "#")):
        yield "write it without a list mark or title"
    for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", text):
        if not (ROOT / link).exists():
            yield f"its link {link} is no file of the repository"


def test_the_fragments_are_well_formed() -> None:
    assert faults(ROOT / SETTINGS["directory"]) == []


def test_what_is_no_fragment_is_found(tmp_path: Path) -> None:
    good = {"a_level.added.md": "New: [see](docs/install.md#a-cluster), or [there](https://example.org/x).\n"}
    bad = {
        "b.new.md": "New.\n",
        "C.added.md": "New.\n",
        "d.md": "New.\n",
        "e.fixed.md": "\n",
        "f.fixed.md": "One.\n\nTwo.\n",
        "g.fixed.md": "- One.\n",
        "h.removed.md": "See [this](docs/nothing.md).\n",
    }
    for name, text in (good | bad).items():
        (tmp_path / name).write_text(text)
    assert sorted(message.split(": ")[0] for message in faults(tmp_path)) == sorted(bad)


def test_the_changelog_has_the_line_below_which_sections_go() -> None:
    assert (ROOT / SETTINGS["filename"]).read_text().count(SETTINGS["start_string"]) == 1

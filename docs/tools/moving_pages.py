"""Tables of keys in the pages of `moving/`, from the file that errors take their hints from. The rest is by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from pieces import table

from rlframework_tools.peers.frameworks import Framework, Row, frameworks, word_of

DOCS = Path(__file__).resolve().parents[1]
SOURCE = "plugins/tools/rlframework_tools/peers/keys.yaml"
BEGIN = f"<!-- Keys of NAME: generated from {SOURCE} by docs/tools/pages.py; do not edit. -->"
END = "<!-- End of keys. -->"
NO_KEY = "needs no key"

_BLOCK = re.compile(re.escape(BEGIN).replace("NAME", r"([\w.]+)") + ".*?" + re.escape(END), re.DOTALL)
_WORD = re.compile(r"[\w.+-]+")


def pages() -> Mapping[str, Callable[[], str]]:
    """Return the functions that generate the pages, by their paths below docs/."""
    return {f"moving/{name}.md": partial(page, name) for name in frameworks()}


def page(name: str) -> str:
    """Return the text of the page `name` with current tables."""
    text = (DOCS / "moving" / f"{name}.md").read_text(encoding="utf-8")
    framework = frameworks()[name]
    shown = [match[1] for match in _BLOCK.finditer(text)]
    if shown != [*framework.tables]:
        raise ValueError(f"moving/{name}.md must have a block for each table {[*framework.tables]}, not {shown}")
    cells = _cells(framework)
    return _BLOCK.sub(lambda match: block(match[1], framework.name, cells[match[1]]), text)


def block(name: str, framework: str, rows: list[tuple[str, str, str]]) -> str:
    """Return the table `name` between its comments."""
    return "\n\n".join([BEGIN.replace("NAME", name), table((framework, "rlframework", "what differs"), rows), END])


def _cells(framework: Framework) -> Mapping[str, list[tuple[str, str, str]]]:
    """The cells of all rows, by table. The values of our key are in the first row that has it."""
    values, cells = dict(framework.values), dict[str, list[tuple[str, str, str]]]()
    for name, rows in framework.tables.items():
        cells[name] = []
        for row in rows:
            theirs = [_shown(key, name) for key in row.keys]
            ours = _codes(key for key in dict.fromkeys(row.keys.values()) if key) or "no counterpart"
            meanings = [_meanings(row, key, _shown(word_of(key), name), values) for key in row.keys]
            differs = "; ".join(filter(None, (row.differs, *meanings)))
            cells[name].append(
                (row.theirs or _codes(framework.prefix + key for key in theirs), row.ours or ours, differs)
            )
    return cells


def _codes(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _shown(key: str, table_name: str) -> str:
    """Return `key` as the page has it: without the last part of the section that its table is of."""
    return re.sub(r"[()]", "", key).removeprefix(f"{table_name.rpartition('.')[2]}.")


def _meanings(row: Row, key: str, word: str, of_ours: dict[str, Mapping[str, str]]) -> str:
    """Return what the values of `key` are, those with the same meaning together. Those of our key leave `of_ours`.

    Those that need no key, or that the cell of our key has, are left out.
    """
    ours, _, set_to = row.keys[key].partition(": ")
    values, by_meaning = {**of_ours.pop(ours, {}), **row.values.get(word_of(key), {})}, dict[str, list[str]]()
    for value, meaning in values.items():
        said = meaning.removeprefix("is ").removeprefix("has ")
        if said != set_to and not meaning.startswith(NO_KEY):
            said = f"`{said}`" if _WORD.fullmatch(said) else said
            by_meaning.setdefault(said, []).append(value if len(row.keys) == 1 else f"{word}: {value}")
    return "; ".join(f"{_codes(each)}: {said}" for said, each in by_meaning.items())

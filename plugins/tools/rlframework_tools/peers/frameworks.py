"""The keys of other frameworks and what they are here, from `keys.yaml`, whose head describes its form.

The file is read once, for the first key or value that is wrong. `docs/tools/moving_pages.py` generates the tables of
`docs/moving/` from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from rlframework.config.further_policies import FURTHER_POLICIES, as_of_policy

IS = "In rlframework this is "

_Loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # of scalars, both make texts
_CELLS = ("theirs", "ours", "differs")


@dataclass(frozen=True)
class Row:
    """Keys of a framework with ours, each as the page has it, and what the page and the errors say of them.

    `hints` and `values` (what each value is here) are by the words of the keys, `also` has words that the page does not
    show; `theirs`, `ours` and `differs` are cells of the page.
    """

    keys: Mapping[str, str]
    also: Mapping[str, str]
    hints: Mapping[str, str]
    values: Mapping[str, Mapping[str, str]]
    theirs: str = ""
    ours: str = ""
    differs: str = ""

    @classmethod
    def read(cls, row: dict[str, Any]) -> Row:
        """Return the row that the file has as `row`."""
        cells = {cell: row.pop(cell, "") for cell in _CELLS}
        also, values, hint = row.pop("also", {}), row.pop("values", {}), row.pop("hint", {})
        hints = hint if isinstance(hint, Mapping) else {word_of(key): hint for key in (*row, *also)}
        return cls(row, also, hints, values, **cells)

    def words(self) -> Iterator[tuple[str, str]]:
        """Yield the words of the keys that have a hint, with our keys.

        A key that is called as ours is left out if nothing is to be said of it: it is found by its name.
        """
        for key, ours in (*self.keys.items(), *self.also.items()):
            word, ours = word_of(key), ours.partition(":")[0]
            same = f".{ours}".endswith(f".{word}") and key not in self.also
            if not same or word in self.hints or word in self.values:
                yield word, ours


@dataclass(frozen=True)
class Framework:
    """A framework: its tables of keys, each by its name, and what else `keys.yaml` says of it."""

    name: str
    tables: Mapping[str, Sequence[Row]]
    tables_of_pairs: Sequence[str] = ()
    preset: str = ""
    formulas: str = ""
    words_of_grpo: Sequence[str] = ()
    words: Sequence[str] = ()
    defaults: Mapping[str, str] = field(default_factory=dict)
    defaults_of: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    prefix: str = ""
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Vocabulary:
    """The words of all frameworks and their counterparts here, each the end of the dotted path of a key.

    `keys` has our key for a word, or "" for one without counterpart; `hints` what to tell about it; `of_pairs` that for
    algorithms on preference pairs, where it differs. `values` has what values are here, by our key; `word_values` by
    the words that have values of their own.
    """

    keys: dict[str, str] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)
    of_pairs: dict[str, str] = field(default_factory=dict)
    values: dict[str, dict[str, str]] = field(default_factory=dict)
    word_values: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def add(self, framework: Framework) -> None:
        """Add the words and values of `framework`, apart from those that are there already."""
        self.add_values(framework.values)
        for name, table in framework.tables.items():
            for row in table:
                for word, ours in row.words():
                    key = as_of_policy(ours) if name in FURTHER_POLICIES else ours
                    self._add_word(word, key, row.hints.get(word, ""), of_pairs=name in framework.tables_of_pairs)
                self.word_values.update(row.values)

    def add_values(self, values: Mapping[str, Mapping[str, str]]) -> None:
        """Add what `values` of our keys are here."""
        for key, meanings in values.items():
            self.values[key] = {**meanings, **self.values.get(key, {})}

    def _add_word(self, word: str, key: str, hint: str, *, of_pairs: bool) -> None:
        text = f"{IS}`{key}`. {hint}".rstrip() if key else hint
        if not of_pairs:
            self.keys.setdefault(word, key)
            self.hints.setdefault(word, text)
        elif text and text != self.hints.get(word):
            self.of_pairs[word] = text


def word_of(key: str) -> str:
    """The part of `key`, as a row has it, that a path must end with."""
    return key.rpartition(")")[2]


@cache
def _file() -> dict[str, Any]:
    text = files(__package__).joinpath("keys.yaml").read_text(encoding="utf-8")
    tree: dict[str, Any] = yaml.load(text, Loader=_Loader)
    return tree


@cache
def frameworks() -> Mapping[str, Framework]:
    """Return the frameworks by the names of their pages."""
    return {page: _framework(dict(tree)) for page, tree in _file().items() if page != "values"}


def _framework(tree: dict[str, Any]) -> Framework:
    tables = {name: [Row.read(dict(row)) for row in rows] for name, rows in tree.pop("tables").items()}
    return Framework(tables=tables, **{name.replace(" ", "_"): value for name, value in tree.items()})


@cache
def vocabulary() -> Vocabulary:
    """Return the words and values of all frameworks; of two that have the same, the first counts."""
    words = Vocabulary()
    for framework in frameworks().values():
        words.add(framework)
    words.add_values(_file()["values"])
    return words

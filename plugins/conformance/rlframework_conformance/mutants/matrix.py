"""The kill matrix: which tests of a suite catch which mutants, and a minimal cover of it, which the proof runs.

`kill_matrix.yaml` has the tests that catch a mutant on every part that they were tried on. `rlframework conformance
PART --kill-matrix FILE` tries each mutant with each test. The file has a line for each pair, so that an interrupted run
goes on where it was.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path

import yaml

from rlframework.base.errors import DataError

Matrix = Mapping[str, Collection[str]]
"""The tests that catch each mutant, by its name."""
STORED = Path(__file__).with_name("kill_matrix.yaml")


@cache
def stored(kind: str) -> Matrix:
    """Return the stored matrix of a kind of part."""
    matrix: Matrix = yaml.load(STORED.read_text("utf-8"), yaml.CSafeLoader)[kind]
    return matrix


def minimal_cover(matrix: Matrix) -> list[tuple[str, str]]:
    """Return pairs (mutant, test) of `matrix` with each mutant and each test at least once, and few of them.

    1. A mutant with few tests comes first, as it has little choice; it takes the test that was taken least often.
    2. A test that no mutant took is added to its first mutant.

    Greedy, and therefore not always the smallest cover: it has at most one pair per mutant and one per test.
    """
    taken: Counter[str] = Counter()
    pairs = []
    for mutant, tests in sorted(matrix.items(), key=lambda row: len(row[1])):
        if tests:
            test = min(tests, key=lambda test: taken[test])
            taken[test] += 1
            pairs.append((mutant, test))
    for mutant, tests in matrix.items():
        for test in tests:
            if not taken[test]:
                taken[test] += 1
                pairs.append((mutant, test))
    order = {mutant: number for number, mutant in enumerate(matrix)}
    return sorted(pairs, key=lambda pair: order[pair[0]])


def note(path: Path, mutant: str, test: str, outcome: str) -> None:
    """Append to the file `path` that `mutant` was `caught` by `test` or `passed` it, or why this cannot be said."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps([mutant, test, outcome]) + "\n")


def drop_cut_line(path: Path) -> None:
    """Remove the last line of the file `path` if it is cut, so that the next pair has a line of its own."""
    if path.exists():
        text = path.read_text("utf-8")
        path.write_text(text[: text.rfind("\n") + 1], "utf-8")


def noted(path: Path) -> dict[tuple[str, str], str]:
    """Return the outcome of each pair of mutant and test in the file `path`; the last line may be cut."""
    rows = {}
    lines = path.read_text("utf-8").split("\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            mutant, test, outcome = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: this is no line of a kill matrix; give another file") from error
        rows[mutant, test] = outcome
    return rows


def summary(outcomes: Mapping[tuple[str, str], str], stored_rows: Matrix) -> Iterable[str]:
    """Lines about measured pairs: the matrix as rows of `kill_matrix.yaml`, and what it says of mutants and tests."""
    caught: dict[str, list[str]] = {mutant: [] for mutant, _ in outcomes}
    killed: dict[str, set[str]] = {test: set() for _, test in outcomes}
    for (mutant, test), outcome in outcomes.items():
        if outcome == "caught":
            caught[mutant].append(test)
            killed[test].add(mutant)
    yield from (f"  {mutant}: [{', '.join(tests)}]" for mutant, tests in caught.items())
    yield f"{len(outcomes)} pairs, {sum(map(len, caught.values()))} caught, {len(minimal_cover(caught))} in a cover"
    wrong = {mutant: set(stored_rows.get(mutant, ())) - set(tests) for mutant, tests in caught.items()}
    for mutant, tests in wrong.items():
        if lost := sorted(test for test in tests if (mutant, test) in outcomes):
            yield f"stored, but not caught: {mutant} by {', '.join(lost)}"
    for test, mutants in killed.items():
        more = next((other for other, theirs in killed.items() if mutants < theirs), None)
        if more is not None:
            yield f"{test} catches {len(mutants)} mutants, all of which {more} catches too"

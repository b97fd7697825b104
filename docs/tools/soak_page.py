"""`results/soak.md`: the attacks of `make soak`, and what they found.

    python docs/tools/soak_page.py LINES.jsonl                 # writes results/soak.json and the page
    python docs/tools/soak_page.py LINES.jsonl --add [COMMIT]  # replaces these attacks alone, with today's date

`LINES.jsonl` has a line for each attack that began, and another one when it ended (`tests/soak/conftest.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pieces import page as page_of
from pieces import table

from rlframework.base.files import write_atomically
from rlframework_conformance.report import machine

RESULTS = Path(__file__).resolve().parents[1] / "results"
_COLUMNS = ("attack", "outcome", "inputs", "seconds", "seed")
_TEXT = """Faults, fuzzed inputs, hostile functions and long runs, each in a bounded form: what is tried and what must
hold is in the docstrings of [the tests](../../tests/soak). An input is a configuration, a batch, a file, or a fault;
the seed repeats an attack: `make soak SOAK_SEED=N`."""

Attack = Mapping[str, Any]


def page() -> str:
    """Return the page."""
    report = json.loads((RESULTS / "soak.json").read_text(encoding="utf-8"))
    attacks: list[Attack] = report["attacks"]
    files = list(dict.fromkeys(attack["file"] for attack in attacks))
    parts = ["# Attacks", _TEXT, _ran_on(report), _total(attacks)]
    for file in files:
        rows = [_row(attack) for attack in attacks if attack["file"] == file]
        title = file.removeprefix("test_").removesuffix(".py").replace("_", " ")
        parts += [f"## {title[0].upper()}{title[1:]}", f"[The tests](../../tests/soak/{file}).", table(_HEAD, rows)]
    return page_of(*parts, "[The JSON](soak.json).", "```shell\nmake soak\n```")


_HEAD = ("attack", "outcome", "inputs", "seconds", "seed", "other figures")


def _row(attack: Attack) -> tuple[str, ...]:
    name, _, case = attack["attack"].removeprefix("test_").partition("[")
    others = ", ".join(f"{key.replace('_', ' ')} {_text(value)}" for key, value in attack["figures"].items())
    return (
        name.replace("_", " ") + (f" (`{case.removesuffix(']')}`)" if case else ""),
        attack["outcome"],
        f"{attack['inputs']:,}" if attack["inputs"] is not None else "-",
        f"{attack['seconds']:,.0f}" if attack["seconds"] is not None else "-",
        str(attack["seed"]),
        others,
    )


def _text(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _ran_on(report: Mapping[str, Any]) -> str:
    found = report["machine"]
    dated = any("commit" in attack["figures"] for attack in report["attacks"])
    apart = " Attacks with a date and a commit in the last column were run then, alone." if dated else ""
    return (
        f"Run on {report['date']} at commit `{report['commit']}`: {found['cpu']}, {found['cores']} cores; Python "
        f"{found['python']}, torch {found['torch']}, transformers {found['transformers']}.{apart}"
    )


def _total(attacks: Iterable[Attack]) -> str:
    attacks = list(attacks)
    outcomes = [attack["outcome"] for attack in attacks]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))
    seconds = sum(attack["seconds"] or 0.0 for attack in attacks)
    inputs = sum(attack["inputs"] or 0 for attack in attacks)
    return f"{len(attacks)} attacks ({counts}) with {inputs:,} inputs, in {seconds:,.0f} seconds of tests."


def report_of(lines: Iterable[str]) -> dict[str, Any]:
    """The contents of `soak.json`: the last line of each attack, on this machine, at the commit that is checked out."""
    last: dict[str, dict[str, Any]] = {}
    for line in map(json.loads, lines):
        own = {name: line.pop(name, None) for name in ("file", *_COLUMNS)}
        line.pop("error", None)
        last[f"{own['file']} {own['attack']}"] = {**own, "figures": line}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    attacks = [last[name] for name in sorted(last)]
    return {
        "date": time.strftime("%Y-%m-%d"), "commit": commit.strip(), "machine": machine(gpu=False), "attacks": attacks,
    }  # fmt: skip


def added(report: dict[str, Any], new: Mapping[str, Any], commit: str | None) -> dict[str, Any]:
    """`report` with the attacks of `new`, each with its date and commit; `commit`: that of `new`, if it is another."""
    when = {"date": new["date"], "commit": commit or new["commit"]}
    attacks = {f"{attack['file']} {attack['attack']}": attack for attack in report["attacks"]}
    for attack in new["attacks"]:
        attacks[f"{attack['file']} {attack['attack']}"] = {**attack, "figures": attack["figures"] | when}
    return {**report, "attacks": [attacks[name] for name in sorted(attacks)]}


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    adds = arguments[1:2] == ["--add"]
    if not 1 <= len(arguments) <= (3 if adds else 1):
        print(__doc__, file=sys.stderr)
        return 2
    report = report_of(Path(arguments[0]).read_text(encoding="utf-8").splitlines())
    if adds:
        old = json.loads((RESULTS / "soak.json").read_text(encoding="utf-8"))
        report = added(old, report, arguments[2] if len(arguments) == 3 else None)
    write_atomically(RESULTS / "soak.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    write_atomically(RESULTS / "soak.md", page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

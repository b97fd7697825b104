"""The pages of the documentation that are made from other things, and whether those that lie in docs/ are current.

    python docs/tools/pages.py            # writes them
    python docs/tools/pages.py --check    # says which are old, and exits with 1 then

They are kept in the repository, so that they can be read where it is hosted; a test holds them to what they are made
of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import benchmarks_page
import commands_page
import configuration_page
import mutants_page
import parity_page
import pictures

DOCS = Path(__file__).resolve().parents[1]
COMMAND = "python docs/tools/pages.py"

PAGES: Mapping[str, Callable[[], str]] = {
    "commands.md": commands_page.page,
    "reference/configuration.md": configuration_page.page,
    "mutants.md": mutants_page.page,
    "results/parity.md": parity_page.page,
    "results/benchmarks.md": benchmarks_page.page,
    **{f"pictures/{name}.svg": draw for name, draw in pictures.PICTURES.items()},
}
"""Path below docs/ to what makes the text."""


def old() -> list[str]:
    """The pages in docs/ that are not what they would be made now."""
    return [name for name, make in PAGES.items() if _text(DOCS / name) != make()]


def write() -> None:
    """Write those that are old."""
    for name, make in PAGES.items():
        if _text(DOCS / name) != (text := make()):
            (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
            (DOCS / name).write_text(text, encoding="utf-8")
            print(f"wrote docs/{name}")


def main(arguments: list[str]) -> int:
    """The command; its exit code."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    if not arguments:
        write()
        return 0
    for name in (stale := old()):
        print(f"docs/{name} is not current: {COMMAND}", file=sys.stderr)
    return bool(stale)


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

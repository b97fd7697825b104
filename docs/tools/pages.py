"""Generate pages of the documentation from code and results, or check that those in docs/ are up to date.

    python docs/tools/pages.py            # writes them
    python docs/tools/pages.py --check    # lists outdated pages; exits with 1 if there are any

The pages are committed, so that they can be read where the repository is hosted; a test checks that they are up to
date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import benchmarks_page
import commands_page
import configuration_page
import interface_pages
import memory_page
import moving_pages
import mutants_page
import parity_page
import peers_page
import pictures
import recipes_page
import sdk_pages
import soak_page

DOCS = Path(__file__).resolve().parents[1]
COMMAND = "python docs/tools/pages.py"

PAGES: Mapping[str, Callable[[], str]] = {
    "commands.md": commands_page.page,
    "reference/configuration.md": configuration_page.page,
    "memory.md": memory_page.page,
    "mutants.md": mutants_page.page,
    "peers.md": peers_page.page,
    "recipes.md": recipes_page.page,
    "results/parity.md": parity_page.page,
    "results/benchmarks.md": benchmarks_page.page,
    "results/soak.md": soak_page.page,
    **{f"pictures/{name}.svg": draw for name, draw in pictures.PICTURES.items()},
    **interface_pages.pages(),
    **moving_pages.pages(),
    **sdk_pages.pages(),
}
"""Path below docs/ to the function that generates the text."""


def old() -> list[str]:
    """Return the outdated pages in docs/."""
    return [name for name, make in PAGES.items() if _text(DOCS / name) != make()]


def write() -> None:
    """Write the outdated pages."""
    for name, make in PAGES.items():
        if _text(DOCS / name) != (text := make()):
            (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
            (DOCS / name).write_text(text, encoding="utf-8")
            print(f"wrote docs/{name}")


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    if not arguments:
        write()
        return 0
    for name in (stale := old()):
        print(f"docs/{name} is out of date; run {COMMAND}", file=sys.stderr)
    return bool(stale)


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Print the exact versions of the packages that are installed here, as a constraints file for pip.

    python tools/constraints.py > constraints.txt

The distributions of this repository, and others that were installed from a folder, are left out. So is the local part
of a version (`+cpu`): the file serves machines with and without GPUs.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions

HEADER = """\
# The versions that the tests have passed with, on Python {python}: `pip install -c constraints.txt ...`
# Written by tools/constraints.py from the environment of the tests; do not edit.
"""
_LEFT_OUT = {"pip"}


def main() -> None:
    """Print the file for the environment of this interpreter."""
    print(HEADER.format(python=".".join(platform.python_version_tuple()[:2])), end="")
    print(*constraints(distributions()), sep="\n")


def constraints(installed: Iterable[Distribution]) -> list[str]:
    """One `name==version` for each distribution of an index, by name."""
    versions: dict[str, str] = {}
    for each in installed:
        name = re.sub(r"[-_.]+", "-", each.name).lower()
        if name not in _LEFT_OUT and not _is_from_folder(each):
            versions.setdefault(name, each.version.partition("+")[0])  # the first is the one that is imported
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def _is_from_folder(distribution: Distribution) -> bool:
    """Whether the distribution was installed from a folder: its `direct_url.json` says so (PEP 610)."""
    return "dir_info" in json.loads(distribution.read_text("direct_url.json") or "{}")


if __name__ == "__main__":
    main()

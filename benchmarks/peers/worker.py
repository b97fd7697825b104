"""A worker of one side of a comparison: `PYTHON worker.py SIDE WORK TASK`, started by `run.py`.

Does not import rlframework, so that each side runs in an environment of its own; `SIDE` names a module of this folder.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from steps import steps

PACKAGES = ("torch", "transformers", "trl", "verl", "accelerate", "rlframework-core")


def installed() -> dict[str, str]:
    """Return the versions of the packages that matter."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Prepare `WORK`, and do its steps until the input ends."""
    side, work, path = sys.argv[1:]
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    torch.set_num_threads(1)
    steps().ready(versions=installed())
    task = json.loads(Path(path).read_text(encoding="utf-8"))
    importlib.import_module(side).WORKS[work](task)


if __name__ == "__main__":
    main()

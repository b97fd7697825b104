"""The Python environment of generation engines in processes of their own, for the `check` of their records."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlframework.config.sections import RunConfig
from rlframework.doctor.checks import ProbeError, ask
from rlframework.plugins.types import Problem
from rlframework.workers.machine import python_path

_PATIENCE = 60.0  # seconds


def engine_environment(config: RunConfig, program: Path) -> Mapping[str, Any]:
    """Return what `program` prints, as JSON in its last line, in the Python of the engines.

    `python`: that Python. If the program fails, there is only that and the `error`. It is run once for each Python.
    """
    workers = config.generation.workers
    return answer_in(python_path(workers.python if workers else None) or sys.executable, program)


@lru_cache(8)
def answer_in(python: str, program: Path) -> Mapping[str, Any]:
    """Return what `program` prints in `python`, as `engine_environment`; remembered."""
    try:
        return {"python": python, **ask([python, "-P", str(program)], _PATIENCE)}
    except ProbeError as error:
        return {"python": python, "error": str(error)}


def process_problems(config: RunConfig, engine: str) -> Iterator[Problem]:
    """Yield a problem if `engine`, which needs a process of its own, would have none."""
    workers = config.generation.workers
    if workers is None or workers.group == "inline":
        key = "generation.workers is not set" if workers is None else "generation.workers.group is inline"
        message = f"{key}. {engine} changes the process that it runs in, so it needs one of its own."
        yield Problem("generation.workers", message, "Set generation.workers.group to processes or ray.")

"""The Python environments of other processes, such as generation engines: programs that answer in JSON."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlframework.config.sections import RunConfig
from rlframework.plugins.types import Problem
from rlframework.workers.machine import python_path

_PATIENCE = 60.0  # seconds


class ProbeError(Exception):
    """A child process failed; the message says how."""


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


def ask(command: Sequence[str], seconds: float) -> Any:
    """Run `command`, and return the JSON in its last line of output. Raises `ProbeError` if it fails or times out."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {seconds:g} s") from None
    except OSError as error:
        raise ProbeError(str(error)) from error
    said = (done.stderr.strip() or "no error output").splitlines()[-1].strip()
    if code := done.returncode:
        how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        raise ProbeError(f"the process ended with {how}: {said}")
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise ProbeError(f"the process gave no readable output: {said}") from None
    if isinstance(found, dict) and set(found) == {"error"}:
        raise ProbeError(found["error"])
    return found

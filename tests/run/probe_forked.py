"""Programs of Python in a process that is forked from one which has imported torch, transformers and the engines.

Importing is most of what a short program takes. A test of imports, or of how an interpreter begins, starts one itself.
"""

from __future__ import annotations

import builtins
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings as python_warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rlframework.distributed.processes import PRELOADED

Done = subprocess.CompletedProcess[str]
SECONDS = 110
"""Less than a test has, which then can say what its program printed."""


def begin_forked(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """A process that has begun with `function`, in the environment of the first that was begun so."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(list(PRELOADED))
    process = server.Process(target=function, args=arguments)
    process.start()
    return process


def run_program(program: Path | str, *words: object, seconds: float = SECONDS, warnings: Sequence[str] = ()) -> Done:
    """A file, or code, with `words` for its arguments; `warnings`: filters in the order of the option -W."""
    return run_forked(_program, program, [str(word) for word in words], list(warnings), seconds=seconds)


def run_forked(
    function: Callable[..., Any],
    *arguments: Any,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
) -> Done:
    """What became of `function`, in `folder` with this process's environment and `environment`.

    `subprocess.TimeoutExpired` after so many seconds.
    """
    with tempfile.TemporaryDirectory() as told:
        out, err = Path(told, "out"), Path(told, "err")
        variables = dict(os.environ) | dict(environment or {})
        process = begin_forked(_begin, folder, variables, out, err, function, arguments)
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(str(arguments), seconds, out.read_text(), err.read_text())
        return Done(arguments, process.exitcode, out.read_text(), err.read_text())


def _begin(
    folder: Path | None,
    variables: dict[str, str],
    out: Path,
    err: Path,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    for path, number in ((out, 1), (err, 2)):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(variables)
    if folder:
        os.chdir(folder)
    function(*arguments)


def _program(program: Path | str, words: list[str], warnings: list[str]) -> None:
    for each in warnings:
        action, _, category = each.partition("::")
        python_warnings.simplefilter(action, getattr(builtins, category or "Warning"))
    if isinstance(program, str):
        sys.argv = ["-c", *words]
        exec(program, {"__name__": "__main__"})  # noqa: S102 - the test's own program
        return
    sys.argv = [str(program), *words]
    sys.path.insert(0, str(program.parent))
    runpy.run_path(str(program), run_name="__main__")

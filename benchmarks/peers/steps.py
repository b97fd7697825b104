"""The end of a worker of its pipes: it does one step per line on its input, and answers with CPU time and results."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any


class Steps:
    """Answers on the process's output; everything else that the process prints goes to its error output.

    A loop that belongs to somebody else calls `done` at the end of each of its steps, which waits for the next one.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._started = 0.0

    def ready(self, **values: Any) -> None:
        """Say that preparations are over, and wait for the first step."""
        self._answer(values)

    def done(self, values: Callable[[], Mapping[str, Any]]) -> None:
        """End a step, answer with its CPU time and `values()`, and wait for the next step."""
        seconds = time.process_time() - self._started
        self._answer({"seconds": seconds, **values()})

    def _answer(self, values: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps(values) + "\n")
        self._answers.flush()
        if not sys.stdin.readline():
            os._exit(0)  # the comparison is over; a trainer's loop could not be left otherwise
        self._started = time.process_time()


@cache
def steps() -> Steps:
    """The steps of this process."""
    return Steps()


def serve(step: Callable[[], Any], values: Callable[[Any], Mapping[str, Any]]) -> None:
    """Do `step` whenever asked to; answer with `values` of what it returned, which are not part of its time."""
    steps().ready()
    while True:
        result = step()
        steps().done(lambda: values(result))  # noqa: B023

"""A worker whose blocks are compiled up to their graphs, and not into C++."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rlframework_dtensor import build
from rlframework_dtensor.compile import compile_blocks
from rlframework_dtensor.worker import DTensorPolicyWorker


class GraphsAlone(DTensorPolicyWorker):
    """The compiler is changed in the worker's own process, which is not kept for other policies."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        build.compile_blocks = partial(compile_blocks, compiler="eager")
        super().__init__(*args, **kwargs)


def graphs(worker: Any) -> int:
    """How many graphs its process has."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

"""A worker whose blocks are compiled only up to their graphs, without C++."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rlframework_dtensor import model_builder
from rlframework_dtensor.model_builder import compile_blocks
from rlframework_dtensor.worker import DTensorPolicyWorker


class GraphsAlone(DTensorPolicyWorker):
    """Replaces the compiler in the worker's own process, which no other policy uses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        model_builder.compile_blocks = partial(compile_blocks, compiler="eager")
        super().__init__(*args, **kwargs)


def graphs(worker: Any) -> int:
    """The number of graphs compiled in its process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

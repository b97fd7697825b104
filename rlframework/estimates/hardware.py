"""GPUs that a run is planned for, given as text such as `8xH100` or `2x24GiB`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlframework.errors import ConfigError
from rlframework.gpu_models import GPU_MODELS, named_gpu

GIB = 1 << 30


@dataclass(frozen=True)
class PlannedGpus:
    """`count` GPUs called `name`, with `memory_bytes` each.

    `per_engine`: those of a generation engine whose plugin is not installed here; None: its plugin says.
    """

    count: int
    name: str
    memory_bytes: int
    per_engine: int | None = None

    @classmethod
    def parse(cls, text: str) -> PlannedGpus:
        """Parse COUNTxNAME, with a name that `named_gpu` knows, or COUNTxMEMORYGiB; else raise `ConfigError`."""
        found = re.fullmatch(r"\s*(\d+)\s*[xX*]\s*(.+?)\s*", text)
        memory = found and re.fullmatch(r"(\d+(?:\.\d+)?)\s*Gi?B", found[2], re.IGNORECASE)
        model = found and named_gpu(found[2])
        if not found or not int(found[1]) or not (memory or model):
            known = ", ".join(model.name for model in GPU_MODELS)
            raise ConfigError(
                f"--on {text!r} names no known GPUs: give their number and model, such as 8xH100, with another memory "
                f"as 8xH100-96GB, or their memory alone, such as 8x80GiB. Known models: {known}"
            )
        if memory:
            return cls(int(found[1]), found[2], int(float(memory[1]) * GIB))
        assert model is not None
        return cls(int(found[1]), model.name, int(model.memory_gib * GIB))

    def __str__(self) -> str:
        return f"{self.count} x {self.name}"

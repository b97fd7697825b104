"""GPUs that a run is planned for, given as text such as `8xH100` or `2x24GiB`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlframework.config.load import compose
from rlframework.config.problems import NOT_GIVEN
from rlframework.errors import ConfigError
from rlframework.gpu_models import GPU_MODELS, gpu_model

GIB = 1 << 30


@dataclass(frozen=True)
class PlannedGpus:
    """`count` GPUs called `name`, with `memory_bytes` each."""

    count: int
    name: str
    memory_bytes: int

    @classmethod
    def parse(cls, text: str) -> PlannedGpus:
        """Parse COUNTxNAME, with a name that `gpu_model` knows, or COUNTxMEMORYGiB; else raise `ConfigError`."""
        found = re.fullmatch(r"\s*(\d+)\s*[xX*]\s*(.+?)\s*", text)
        memory = found and re.fullmatch(r"(\d+(?:\.\d+)?)\s*Gi?B", found[2], re.IGNORECASE)
        model = found and gpu_model(found[2])
        if not found or not int(found[1]) or not (memory or model):
            known = ", ".join(model.name for model in GPU_MODELS)
            raise ConfigError(
                f"--on {text!r} names no GPUs: give their number and model, such as 8xH100, or their memory, such as "
                f"8x80GiB. Known models: {known}"
            )
        if memory:
            return cls(int(found[1]), found[2], int(float(memory[1]) * GIB))
        assert model is not None
        return cls(int(found[1]), model.name, int(model.memory_gib * GIB))

    def overrides(self, source: str, others: Sequence[str]) -> list[str]:
        """Return changes of the configuration in the file `source`: a worker on each GPU, in processes if several.

        They come before `others`, the user's own, which take precedence.
        """
        found = ["device=cuda", f"worker_group.num_workers={self.count}"]
        name = compose(source, others).get(("worker_group", "name"))
        if self.count > 1 and name in (NOT_GIVEN, "inline"):
            found.append("worker_group.name=processes")
        return found

    def __str__(self) -> str:
        return f"{self.count} x {self.name}"

"""GPUs that a run is planned for, given as text such as `8xH100`, `2x8xH100` or `2x24GiB`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from rlframework.base.errors import ConfigError
from rlframework.base.gpu_models import GPU_MODELS, GpuModel

GIB = 1 << 30
GPUS_PER_MACHINE = 8
"""GPUs of a machine, unless their number is given."""

_COUNT = r"(\d+)\s*[xX*]\s*"


_NOISE = re.compile(r"(nvidia|geforce|tesla|sxm\d?|hbm\d?e?)$")
_MEMORY = r"(\d+(?:\.\d+)?)\s*(?:gi?b?)?"
_NOMINAL = 1.1
"""The nominal size of a GPU's memory is at most this many times what torch can allocate."""


def named_gpu(text: str) -> GpuModel | None:
    """Return the model that a person means by `text`; None unless every word of it is understood.

    Such as `h100`, `A100-40`, `A100-SXM4-80GB`, `RTX4090`, `H100-96GB`. A memory in GB or GiB that is not the nominal
    size of the model is taken as it is: the result then has this `memory_gib`, and a `name` with it.
    """
    words = " ".join(word for word in re.split(r"[\s_-]+", text.lower()) if word and not _NOISE.match(word))
    for model in GPU_MODELS:
        name = r"(?:\s+pcie)?\s*".join(map(re.escape, model.name.lower().split()))
        name = re.sub(r"(\d)gb$", r"\1(?:gi?b?)?", name)  # `A100-40` is enough
        found = re.fullmatch(rf"{name}(?:\s+pcie)?(?:\s+{_MEMORY})?", words)
        if found and (given := float(found[1] or model.memory_gib)):
            nominal = model.memory_gib <= given <= _NOMINAL * model.memory_gib
            return model if nominal else replace(model, name=f"{model.name} {given:g}GB", memory_gib=given)
    return None


@dataclass(frozen=True)
class PlannedGpus:
    """`count` GPUs called `name`, with `memory_bytes` each.

    `per_engine`: those of a generation engine whose plugin is not installed here; None: its plugin says. `machines`:
    how many have the same number of the GPUs each; None: not known.
    """

    count: int
    name: str
    memory_bytes: int
    per_engine: int | None = None
    machines: int | None = None

    @property
    def gpus_per_machine(self) -> int:
        """The number of GPUs of each machine, `GPUS_PER_MACHINE` if it is not given."""
        return GPUS_PER_MACHINE if self.machines is None else self.count // self.machines

    @classmethod
    def parse(cls, text: str) -> PlannedGpus:
        """Parse COUNTxNAME, with a name that `named_gpu` knows, or COUNTxMEMORYGiB; MACHINESx may be before it.

        Raises `ConfigError` for other texts.
        """
        found = re.fullmatch(rf"\s*(?:{_COUNT})?{_COUNT}(.+?)\s*", text)
        memory = found and re.fullmatch(r"(\d+(?:\.\d+)?)\s*Gi?B", found[3], re.IGNORECASE)
        model = found and named_gpu(found[3])
        machines = int(found[1]) if found and found[1] else None
        count = int(found[2]) * (1 if machines is None else machines) if found else 0
        if not found or not count or not (memory or model):
            known = ", ".join(model.name for model in GPU_MODELS)
            raise ConfigError(
                f"--on {text!r} names no known GPUs: give their number and model, such as 8xH100, 2x8xH100 for two "
                "machines, with another memory as 8xH100-96GB, or their memory alone, such as 8x80GiB. Known models: "
                f"{known}"
            )
        if memory:
            return cls(count, found[3], int(float(memory[1]) * GIB), machines=machines)
        assert model is not None
        return cls(count, model.name, int(model.memory_gib * GIB), machines=machines)

    def __str__(self) -> str:
        count = self.count if self.machines is None else f"{self.machines} x {self.gpus_per_machine}"
        return f"{count} x {self.name}"

"""The plan of a run for GPUs that may be elsewhere: what its configuration leaves open is chosen for them.

What the configuration says stays as it is: `--on` names hardware, and changes only `device`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from rlframework.base.errors import ConfigError
from rlframework.base.gpu_models import GPU_MODELS, GpuModel
from rlframework.config.further_policies import FURTHER_POLICIES
from rlframework.config.load import Source, compose
from rlframework.config.problems import NOT_GIVEN
from rlframework.config.sections import GenerationConfig, RunConfig
from rlframework.config.yaml_text import Tree
from rlframework.plugins.configure import load, manager_of
from rlframework.plugins.discovery import extra_of, install_command
from rlframework.plugins.manager import PluginManager
from rlframework.plugins.types import GenerationEngineRecord

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


ENGINE = GenerationEngineRecord.kind


@dataclass(frozen=True)
class Plan:
    """A run that is planned: its configuration, the `changes` that the plan made to it, and `notes` for the user."""

    config: RunConfig
    gpus: PlannedGpus
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def plan_run(source: Source, overrides: Sequence[str], gpus: PlannedGpus) -> Plan:
    """Load the configuration in `source` for `gpus`: workers on those that engines leave, unless it says how many.

    What only this machine lacks, such as the environment of vLLM, is in the notes. Raises like `load_config`.
    """
    tree = compose(source, overrides)
    manager = manager_of(tree)
    gpus, swapped, notes = _engine_elsewhere(tree, manager, gpus)
    changes = _changes(tree, gpus, gpus_of_engine(tree, manager))
    config, _, problems = load(source, [*changes, *overrides, *swapped], manager=manager, elsewhere=True)
    if config.device == "cpu":
        raise ConfigError("--on plans for GPUs, and device=cpu needs none: leave one of them out")
    notes += [f"note: not checked on this machine: {problem}" for problem in problems]
    return Plan(config, gpus, tuple(changes), (*notes, *_group_notes(config, gpus)))


def _changes(tree: Tree, gpus: PlannedGpus, per_engine: int) -> list[str]:
    """Overrides for keys that the configuration leaves open."""
    found = [] if ("device",) in tree.overridden else ["device=cuda"]
    name, workers = tree.get(("worker_group", "name")), tree.get(("worker_group", "num_workers"))
    engines = tree.get(("generation", "workers"))
    in_ray = isinstance(engines, Mapping) and engines.get("group") == "ray"
    wanted = workers if isinstance(workers, int) else gpus.count
    group = name if name is not NOT_GIVEN or wanted == 1 else _group(wanted, gpus, in_ray=in_ray)
    if workers is NOT_GIVEN and group not in (NOT_GIVEN, "inline"):
        engine_gpus = engines.get("num_workers", 1) * per_engine if in_ray else 0
        wanted = _whole_replicas(tree, _left_by_ray(tree, gpus.count - engine_gpus) if group == "ray" else gpus.count)
        found.append(f"worker_group.num_workers={wanted}")
    if group != name:
        found.append(f"worker_group.name={group}")
    unplaced = group == "ray" and tree.get(("worker_group", "workers_per_node")) is NOT_GIVEN
    if unplaced and gpus.machines is not None and wanted == gpus.count:
        found.append(f"worker_group.workers_per_node={gpus.gpus_per_machine}")
    return found


def _group(workers: int, gpus: PlannedGpus, *, in_ray: bool) -> str:
    """Return the worker group for several workers on `gpus`; `in_ray`: beside engines that Ray places."""
    return "ray" if in_ray or workers > gpus.gpus_per_machine else "processes"


def _left_by_ray(tree: Tree, gpus: int) -> int:
    """Return the policy's share of `gpus`: each further policy has as many workers, or the number that it names."""
    policies = 1
    for section in (name for name in FURTHER_POLICIES if tree.get((name,)) not in (NOT_GIVEN, None)):
        group, number = (tree.get((section, "worker_group", key)) for key in ("name", "num_workers"))
        if group in (NOT_GIVEN, "ray"):
            policies += number is NOT_GIVEN
            gpus -= number if isinstance(number, int) else 0
    return gpus // policies


def _whole_replicas(tree: Tree, workers: int) -> int:
    """The most workers, at least 1 and at most `workers`, that hold whole replicas of the model."""
    size = 1
    for axis in ("tensor", "context", "pipeline"):
        degree = tree.get(("policy", "parallelism", axis))
        size *= degree if isinstance(degree, int) and degree > 0 else 1
    return max(1, workers - workers % size if workers >= size else workers)


def gpus_of_engine(tree: Tree, manager: PluginManager) -> int:
    """The GPUs of an engine in a process of its own, as its plugin says."""
    name = tree.get(("generation", "name"))
    found = manager.registered(ENGINE).get(name if isinstance(name, str) else "")
    if found is None:
        degree = tree.get(("generation", "vllm", "tensor_parallel_size"))
        return degree if isinstance(degree, int) else 1
    record: Any = found.record
    try:
        section: GenerationConfig = (record.config_model or record.section).model_validate(tree.values["generation"])
    except ValidationError:  # which loading the configuration reports
        return 1
    return 1 if record.gpus_per_engine is None else int(record.gpus_per_engine(section))


def _engine_elsewhere(
    tree: Tree, manager: PluginManager, gpus: PlannedGpus
) -> tuple[PlannedGpus, list[str], list[str]]:
    """For an engine of ours whose plugin is not installed: overrides with core's own in its place, and a note."""
    name = tree.get(("generation", "name"))
    if not isinstance(name, str) or extra_of(name) is None or any(row.name == name for row in manager.listing()):
        return gpus, [], []
    swapped = ["generation.name=transformers"]
    if tree.get(("generation", name)) is not NOT_GIVEN:
        swapped.append(f"~generation.{name}")
    if tree.get(("policy", "lora", "refit")) == "adapters":
        swapped.append("policy.lora.refit=merged")
    note = (
        f"note: not checked on this machine: the section generation of {name!r}, whose plugin is not installed; the "
        f"estimate counts core's own engine in its place. To check it: {install_command(str(name))}"
    )
    return replace(gpus, per_engine=gpus_of_engine(tree, manager)), swapped, [note]


def _group_notes(config: RunConfig, gpus: PlannedGpus) -> list[str]:
    """Notes on a group of workers that does not go with the number of GPUs."""
    group, workers = config.worker_group, config.worker_group.num_workers
    notes = []
    if group.name == "processes" and workers > gpus.gpus_per_machine:
        notes.append(
            f"note: worker_group.name=processes starts all {workers} workers on one machine; set it to ray for several "
            "machines (docs/cluster.md)"
        )
    if group.name == "inline" and gpus.count > 1:
        name = _group(gpus.count, gpus, in_ray=False)
        notes.append(
            f"note: worker_group.name=inline is a single worker; worker_group.name={name} "
            f"worker_group.num_workers={gpus.count} has one on each GPU"
        )
    return notes

"""Checks a configuration against the capabilities of a selected plugin, before any process starts.

Capability flags come first, then the record's own `check` for combinations that flags cannot express.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from rlframework.config.problems import Problem
from rlframework.config.sections import RunConfig
from rlframework.errors import PluginError
from rlframework.plugins.manager import Registered
from rlframework.plugins.types import CAPABILITY_OF_AXIS, CAPABILITY_OF_FORM, Capability

_TRANSPORT = {"ipc": Capability.IPC_REFIT, "collective": Capability.COLLECTIVE_REFIT}


class _Need(NamedTuple):
    """A configuration key, the capability that it needs (by value, or at any but its default), and how to avoid it."""

    key: str
    capability: Capability | Mapping[str, Capability]
    remedy: str


_NEEDS = (
    *(
        _Need(f"policy.parallelism.{axis}", CAPABILITY_OF_AXIS[axis], "Set it to 1")
        for axis in ("tensor", "context", "pipeline", "expert")
    ),
    _Need("policy.parallelism.sequence", Capability.SEQUENCE_PARALLEL, "Set it to false"),
    _Need(
        "policy.batching.mode",
        {"dynamic": Capability.DYNAMIC_BATCHING, "packed": Capability.PACKING},
        "Set it to auto or padded",
    ),
    _Need(
        "policy.precision",
        {"bfloat16": Capability.BFLOAT16, "float16": Capability.FLOAT16},
        "Set it to float32",
    ),
    _Need("policy.router_aux_loss_coef", Capability.EXPERT_PARALLEL, "Set it to 0"),
    _Need("policy.activation_checkpointing", Capability.ACTIVATION_CHECKPOINTING, "Set it to false"),
    _Need("policy.head", Capability.SCORING, "Set it to language"),
    _Need("policy.offload.parameters", Capability.CPU_OFFLOAD, "Set it to false"),
    _Need("policy.offload.optimizer", Capability.CPU_OFFLOAD, "Set it to false"),
    _Need("policy.lora", Capability.LORA, "Remove the section"),
    _Need("checkpoints.every", Capability.PORTABLE_OPTIMIZER_STATE, "Set it to 0"),
    _Need("checkpoints.format", CAPABILITY_OF_FORM, "Set it to portable"),
)
"""The keys that need a capability of the training backend, whatever the other keys."""


def check_config(config: RunConfig, registered: Registered, device: str) -> list[Problem]:
    """Return the settings of `config` that the plugin does not support on `device` ("cpu" or "cuda").

    Policy workers and generation engines are checked against their capabilities, and every record by its own `check`.
    Raises `PluginError` if that check itself fails.
    """
    problems = _own_problems(config, registered, device)
    if registered.record.kind == "policy_worker":
        problems = [*_capability_problems(config, registered), *problems]
    elif registered.record.kind == "generation_engine":
        problems = [*_engine_problems(config, registered), *problems]
    return problems


def _engine_problems(config: RunConfig, registered: Registered) -> Iterator[Problem]:
    """Reject an engine in a separate process that cannot receive weights there."""
    record, transport = registered.record, config.generation.refit.transport
    wanted = set(_TRANSPORT.values()) if transport == "auto" else {_TRANSPORT[transport]}
    if config.generation.workers is not None and not wanted & record.capabilities:
        names = " or ".join(sorted(wanted))
        yield Problem(
            "generation.workers",
            f"the engine {record.name!r} ({registered.blame}) does not declare {names}, so it cannot receive weights.",
            "Remove generation.workers, change generation.refit.transport, or choose another generation.name.",
            undeclared=True,
        )


def _capability_problems(config: RunConfig, registered: Registered) -> Iterator[Problem]:
    record = registered.record
    for key, value, capability, remedy in _needs(config):
        if capability not in record.capabilities:
            yield Problem(
                key,
                f"{value}, but the backend {record.name!r} ({registered.blame}) does not declare {capability}.",
                f"{remedy}, or choose a backend that declares it (`rlframework plugins` lists them).",
                undeclared=True,
            )


def _needs(config: RunConfig) -> Iterator[tuple[str, object, Capability, str]]:
    """Yield key, value, the capability that the value needs, and how to avoid needing it."""
    for key, needed, remedy in _NEEDS:
        section, _, name = key.rpartition(".")
        holder = attrgetter(section)(config)
        value = getattr(holder, name)
        if isinstance(needed, Mapping):
            if value in needed:
                yield key, value, needed[value], remedy
        elif value != type(holder).model_fields[name].default:
            shown = "set" if key == "policy.lora" else value
            yield key, "true" if value is True else shown, needed, remedy
    workers, transport = config.worker_group.num_workers, config.generation.refit.transport
    if workers > config.policy.parallelism.model_size:
        yield "worker_group.num_workers", workers, Capability.DATA_PARALLEL, "Use fewer workers"
    if config.generation.workers is not None and transport != "auto":
        remedy = "Set it to auto, or remove generation.workers"
        yield "generation.refit.transport", transport, _TRANSPORT[transport], remedy


def _own_problems(config: RunConfig, registered: Registered, device: str) -> list[Problem]:
    record = registered.record
    if record.check is None:
        return []
    whose = f"The check of the {record.kind} {record.name!r} ({registered.blame})"
    try:
        problems = list(record.check(config, device))
    except Exception as error:
        raise PluginError(f"{whose} failed: {type(error).__name__}: {error}") from error
    strange = [problem for problem in problems if not isinstance(problem, Problem)]
    if strange:
        raise PluginError(f"{whose} must return a list of Problem, but it contains {strange[0]!r}")
    return problems

"""Checks a configuration against the capabilities of a selected plugin, before any process starts.

Capability flags come first, then the record's own `check` for combinations that flags cannot express.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import RunConfig
from rlframework.errors import PluginError
from rlframework.plugins.manager import Registered
from rlframework.plugins.types import CAPABILITY_OF_AXIS, CAPABILITY_OF_FORM, Capability, Problem

_MODEL_AXES = ("tensor", "context", "pipeline", "expert")
_BATCHING = {"dynamic": Capability.DYNAMIC_BATCHING, "packed": Capability.PACKING}
_PRECISION = {"bfloat16": Capability.BFLOAT16, "float16": Capability.FLOAT16}

_TRANSPORT = {"ipc": Capability.IPC_REFIT, "collective": Capability.COLLECTIVE_REFIT}


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


def _engine_problems(config: RunConfig, registered: Registered) -> list[Problem]:
    """Reject an engine in a separate process that cannot receive weights there."""
    record, transport = registered.record, config.generation.refit.transport
    wanted = set(_TRANSPORT.values()) if transport == "auto" else {_TRANSPORT[transport]}
    if config.generation.workers is None or wanted & record.capabilities:
        return []
    names = " or ".join(sorted(wanted))
    message = f"the engine {record.name!r} ({registered.blame}) does not declare {names}, so it cannot receive weights."
    hint = "Remove generation.workers, change generation.refit.transport, or choose another generation.name."
    return [Problem(key="generation.workers", message=message, hint=hint, undeclared=True)]


def _capability_problems(config: RunConfig, registered: Registered) -> list[Problem]:
    record = registered.record
    return [
        Problem(
            key=key,
            message=f"{value}, but the backend {record.name!r} ({registered.blame}) does not declare {capability}.",
            hint=f"{remedy}, or choose a backend that declares it (`rlframework plugins` lists them).",
            undeclared=True,
        )
        for key, value, capability, remedy in _needs(config)
        if capability not in record.capabilities
    ]


def _needs(config: RunConfig) -> Iterator[tuple[str, object, Capability, str]]:
    """Yield key, value, the capability that the value needs, and how to avoid needing it."""
    policy = config.policy
    for axis in _MODEL_AXES:
        size = getattr(policy.parallelism, axis)
        if size > 1:
            yield f"policy.parallelism.{axis}", size, CAPABILITY_OF_AXIS[axis], "Set it to 1"
    if policy.parallelism.sequence:
        yield "policy.parallelism.sequence", "true", CAPABILITY_OF_AXIS["sequence"], "Set it to false"
    if config.worker_group.num_workers > policy.parallelism.model_size:
        workers = config.worker_group.num_workers
        yield "worker_group.num_workers", workers, Capability.DATA_PARALLEL, "Use fewer workers"
    if policy.batching.mode in _BATCHING:
        yield "policy.batching.mode", policy.batching.mode, _BATCHING[policy.batching.mode], "Set it to auto or padded"
    if policy.precision in _PRECISION:
        yield "policy.precision", policy.precision, _PRECISION[policy.precision], "Set it to float32"
    yield from _switches(policy)
    if config.generation.workers is not None and config.generation.refit.transport != "auto":
        transport = config.generation.refit.transport
        yield (
            "generation.refit.transport",
            transport,
            _TRANSPORT[transport],
            "Set it to auto, or remove generation.workers",
        )
    if config.checkpoints.every:
        every = config.checkpoints.every
        yield "checkpoints.every", every, Capability.PORTABLE_OPTIMIZER_STATE, "Set it to 0"
    if config.checkpoints.format in CAPABILITY_OF_FORM:
        form = config.checkpoints.format
        yield "checkpoints.format", form, CAPABILITY_OF_FORM[form], "Set it to portable"


def _switches(policy: PolicyConfig) -> Iterator[tuple[str, object, Capability, str]]:
    if policy.router_aux_loss_coef:
        yield "policy.router_aux_loss_coef", policy.router_aux_loss_coef, Capability.EXPERT_PARALLEL, "Set it to 0"
    if policy.activation_checkpointing:
        key = "policy.activation_checkpointing"
        yield key, "true", Capability.ACTIVATION_CHECKPOINTING, "Set it to false"
    if policy.head == "score":
        yield "policy.head", "score", Capability.SCORING, "Set it to language"
    if policy.offload.parameters:
        yield "policy.offload.parameters", "true", Capability.CPU_OFFLOAD, "Set it to false"
    if policy.offload.optimizer:
        yield "policy.offload.optimizer", "true", Capability.CPU_OFFLOAD, "Set it to false"
    if policy.lora is not None:
        yield "policy.lora", "set", Capability.LORA, "Remove the section"


def _own_problems(config: RunConfig, registered: Registered, device: str) -> list[Problem]:
    record = registered.record
    if record.check is None:
        return []
    try:
        problems = list(record.check(config, device))
    except Exception as error:
        raise PluginError(f"{_whose(registered)} failed: {type(error).__name__}: {error}") from error
    strange = [problem for problem in problems if not isinstance(problem, Problem)]
    if strange:
        raise PluginError(f"{_whose(registered)} must return a list of Problem, but it contains {strange[0]!r}")
    return problems


def _whose(registered: Registered) -> str:
    return f"The check of the {registered.record.kind} {registered.record.name!r} ({registered.blame})"

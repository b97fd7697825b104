"""Checks a configuration against the capabilities of a selected plugin, before any process starts.

Capability flags come first, then the record's own `check` for combinations that flags cannot express.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter

from rlframework.base.errors import PluginError
from rlframework.config.problems import Problem
from rlframework.config.sections import RunConfig
from rlframework.plugins.manager import Registered
from rlframework.plugins.types import CAPABILITY_OF_AXIS, CAPABILITY_OF_FORM, Capability

_TRANSPORT = {"ipc": Capability.IPC_REFIT, "collective": Capability.COLLECTIVE_REFIT}
_BATCHING = {"dynamic": Capability.DYNAMIC_BATCHING, "packed": Capability.PACKING}
_PRECISION = {"bfloat16": Capability.BFLOAT16, "float16": Capability.FLOAT16}
_NEEDS: tuple[tuple[str, Capability | Mapping[str, Capability], str], ...] = (
    ("policy.parallelism.tensor", CAPABILITY_OF_AXIS["tensor"], "Set it to 1"),
    ("policy.parallelism.context", CAPABILITY_OF_AXIS["context"], "Set it to 1"),
    ("policy.parallelism.pipeline", CAPABILITY_OF_AXIS["pipeline"], "Set it to 1"),
    ("policy.parallelism.expert", CAPABILITY_OF_AXIS["expert"], "Set it to 1"),
    ("policy.parallelism.sequence", CAPABILITY_OF_AXIS["sequence"], "Set it to false"),
    ("policy.batching.mode", _BATCHING, "Set it to auto or padded"),
    ("policy.precision", _PRECISION, "Set it to float32"),
    ("policy.router_aux_loss_coef", Capability.EXPERT_PARALLEL, "Set it to 0"),
    ("policy.activation_checkpointing", Capability.ACTIVATION_CHECKPOINTING, "Set it to false"),
    ("policy.head", Capability.SCORING, "Set it to language"),
    ("policy.offload.parameters", Capability.CPU_OFFLOAD, "Set it to false"),
    ("policy.offload.optimizer", Capability.CPU_OFFLOAD, "Set it to false"),
    ("policy.optimizer.name", {"muon": Capability.MUON}, "Set it to adamw"),
    ("policy.lora", Capability.LORA, "Remove the section"),
    ("policy.freeze", Capability.MULTIMODAL, "Remove it"),
    ("checkpoints.every", Capability.PORTABLE_OPTIMIZER_STATE, "Set it to 0"),
    ("checkpoints.format", CAPABILITY_OF_FORM, "Set it to portable"),
)
"""Keys, the capability of the backend that each needs (by value, or at any but its default), and how to avoid it."""


def check_config(config: RunConfig, registered: Registered, device: str) -> list[Problem]:
    """Return the settings of `config` that the plugin does not support on `device` ("cpu" or "cuda").

    Policy workers and generation engines are checked against their capabilities, and every record by its own `check`.
    Raises `PluginError` if that check itself fails.
    """
    record, problems = registered.record, list[Problem]()
    if record.kind == "policy_worker":
        problems += [
            Problem(
                key,
                f"{value}, but the backend {record.name!r} ({registered.blame}) does not declare {capability}.",
                f"{remedy}, or choose a backend that declares it (`rlframework plugins` lists them).",
                undeclared=True,
            )
            for key, value, capability, remedy in _needs(config)
            if capability not in record.capabilities
        ]
    elif record.kind == "generation_engine":
        problems += _of_generation(config, registered)
    return problems + _own_problems(config, registered, device)


def _of_generation(config: RunConfig, registered: Registered) -> Iterator[Problem]:
    """Yield the keys of a run that the generation engine does not support."""
    record = registered.record
    engine = f"the engine {record.name!r} ({registered.blame})"
    if config.environment.images is not None and Capability.MULTIMODAL not in record.capabilities:
        message = f"set, but {engine} does not declare multimodal."
        hint = "Remove the section, or choose another generation.name."
        yield Problem("environment.images", message, hint, undeclared=True)
    if config.generation.workers is not None:
        transport = config.generation.refit.transport
        wanted = set(_TRANSPORT.values()) if transport == "auto" else {_TRANSPORT[transport]}
        if not wanted & record.capabilities:
            message = f"{engine} does not declare {' or '.join(sorted(wanted))}, so it cannot receive weights."
            hint = "Remove generation.workers, change generation.refit.transport, or choose another generation.name."
            yield Problem("generation.workers", message, hint, undeclared=True)
        lora = config.policy.lora
        if lora is not None and lora.refit == "adapters" and Capability.LORA_REFIT not in record.capabilities:
            message = f"adapters, but {engine} does not declare lora_refit."
            hint = "Set it to merged, or choose another generation.name."
            yield Problem("policy.lora.refit", message, hint, undeclared=True)


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
    whose = f"The check of the {record.kind} {record.name!r} ({registered.blame})"
    try:
        problems = record.check(config, device) if record.check is not None else []
    except Exception as error:
        raise PluginError(f"{whose} failed: {type(error).__name__}: {error}") from error
    for problem in problems:
        if not isinstance(problem, Problem):
            raise PluginError(f"{whose} must return a list of Problem, but it contains {problem!r}")
    return problems

"""The specification of a policy's workers, made from a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlframework.config.policy import PolicyConfig
from rlframework.errors import NotSupported
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.plugins.types import Capability, Record
from rlframework.policy.optimization import resolve_total_steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import RunConfig
    from rlframework.plugins.manager import PluginManager


def worker_spec(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    manager: PluginManager,
    *,
    init_reference_model: bool,
    init_optimizer: bool,
    training_calls: int | None = None,
) -> WorkerSpec:
    """The specification that each worker of the policy in `config` is started with; see `Policy` for the arguments."""
    record = manager.select("policy_worker", config.policy.backend).record
    neutral = {name: getattr(config.policy, name) for name in PolicyConfig.model_fields}
    neutral["scheduler"] = resolve_total_steps(config.policy.scheduler, training_calls or config.algorithm.num_steps)
    section = getattr(config.policy, config.policy.backend, None)
    generates = Capability.EMBEDDED_GENERATION in record.capabilities
    engine = manager.select("generation_engine", config.generation.name).record.target if generates else None
    return WorkerSpec(
        target=record.target,
        part=(record.kind, record.name),
        kwargs={
            "config": PolicyConfig(**neutral),
            "tokenizer": tokenizer,
            "init_optimizer": init_optimizer,
            "init_reference_model": init_reference_model,
            "backend_config": None if section is None else section.model_dump(),
            "generation": config.generation,
            "generation_target": engine,
            "processor_target": manager.select("data_processor", config.policy.data_processor).record.target,
        },
        plugins=tuple(config.plugins),
        fingerprint=manager.fingerprint(),
        py_executable=record.py_executable,
    )


def require(record: Record, capability: Capability, reason: str) -> None:
    """Raise `NotSupported` unless the backend of `record` declares `capability`."""
    if capability not in record.capabilities:
        raise NotSupported(
            f"{reason}, but the backend {record.name!r} does not declare {capability}; choose a policy.backend that "
            "does: see `rlframework plugins`"
        )

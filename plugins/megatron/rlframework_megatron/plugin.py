"""Plugin entry point: the record of the `megatron` backend. Does not import torch."""

from __future__ import annotations

from typing import Any

from rlframework.config.sections import RunConfig
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import Capability, PolicyWorkerRecord
from rlframework_megatron.config import MegatronConfig, check, device_defaults


@hookimpl
def rlframework_policy_workers() -> list[PolicyWorkerRecord]:
    """`policy.backend: megatron`."""
    return [
        PolicyWorkerRecord(
            name="megatron",
            target="rlframework_megatron.worker:MegatronPolicyWorker",
            summary="megatron-core: tensor, pipeline, context and expert parallelism, for Llama and Qwen models",
            api_version=1,
            capabilities=frozenset(
                {
                    Capability.DATA_PARALLEL,
                    Capability.TENSOR_PARALLEL,
                    Capability.SEQUENCE_PARALLEL,
                    Capability.CONTEXT_PARALLEL,
                    Capability.PIPELINE_PARALLEL,
                    Capability.EXPERT_PARALLEL,
                    Capability.DYNAMIC_BATCHING,
                    Capability.PACKING,
                    Capability.ACTIVATION_CHECKPOINTING,
                    Capability.BFLOAT16,
                    Capability.CPU_OFFLOAD,
                    Capability.REFERENCE_MODEL,
                    Capability.SCORING,
                    Capability.EMBEDDED_GENERATION,
                    Capability.COLLECTIVE_REFIT,
                    Capability.IPC_REFIT,
                    Capability.PORTABLE_OPTIMIZER_STATE,
                    Capability.LORA,
                    Capability.SHARDED_CHECKPOINTS,
                    Capability.NATIVE_CHECKPOINTS,
                }
            ),
            config_model=MegatronConfig,
            check=check,
            device_defaults=device_defaults,
        )
    ]


@hookimpl
def rlframework_state_layout(config: RunConfig, worker: Any) -> Any:
    """Return what the engine keeps in memory on `worker`, if it is the run's."""
    if config.policy.backend != "megatron":
        return None
    from rlframework_megatron.state_layout import state_layout

    return state_layout(config, worker)

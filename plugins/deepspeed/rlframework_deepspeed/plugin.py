"""Plugin entry point: the record of the `deepspeed` backend. Does not import torch or deepspeed."""

from __future__ import annotations

from typing import Any

from rlframework.config.sections import RunConfig
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import Capability, PolicyWorkerRecord
from rlframework_deepspeed.config import DeepSpeedConfig
from rlframework_deepspeed.config_checks import check
from rlframework_deepspeed.device_defaults import device_defaults


@hookimpl
def rlframework_policy_workers() -> list[PolicyWorkerRecord]:
    """`policy.backend: deepspeed`."""
    return [
        PolicyWorkerRecord(
            name="deepspeed",
            target="rlframework_deepspeed.worker:DeepSpeedPolicyWorker",
            summary="ZeRO 0 to 3 and AutoTP of DeepSpeed, for any causal LM of transformers",
            api_version=1,
            capabilities=frozenset(
                {
                    Capability.DATA_PARALLEL,
                    Capability.TENSOR_PARALLEL,
                    Capability.CONTEXT_PARALLEL,
                    Capability.DYNAMIC_BATCHING,
                    Capability.PACKING,
                    Capability.ACTIVATION_CHECKPOINTING,
                    Capability.BFLOAT16,
                    Capability.FLOAT16,
                    Capability.REFERENCE_MODEL,
                    Capability.SCORING,
                    Capability.CPU_OFFLOAD,
                    Capability.EMBEDDED_GENERATION,
                    Capability.COLLECTIVE_REFIT,
                    Capability.IPC_REFIT,
                    Capability.LEARNED_POSITIONS,
                    Capability.PORTABLE_OPTIMIZER_STATE,
                    Capability.LORA,
                    Capability.MULTIMODAL,
                    Capability.SHARDED_CHECKPOINTS,
                    Capability.NATIVE_CHECKPOINTS,
                }
            ),
            config_model=DeepSpeedConfig,
            check=check,
            device_defaults=device_defaults,
        )
    ]


@hookimpl
def rlframework_state_layout(config: RunConfig, worker: Any) -> Any:
    """Return what the engine keeps in memory on `worker`, if it is the run's."""
    if config.policy.backend != "deepspeed":
        return None
    from rlframework_deepspeed.zero_memory import state_layout

    return state_layout(config, worker)

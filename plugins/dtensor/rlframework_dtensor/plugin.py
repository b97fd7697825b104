"""The entry point: the record of the backend `dtensor`. Imports no torch."""

from __future__ import annotations

from typing import Any

from rlframework.config.sections import RunConfig
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import Capability, PolicyWorkerRecord
from rlframework_dtensor.config import DTensorConfig, check


@hookimpl
def rlframework_policy_workers() -> list[PolicyWorkerRecord]:
    """Return the record selected by `policy.backend: dtensor`."""
    return [
        PolicyWorkerRecord(
            name="dtensor",
            target="rlframework_dtensor.worker:DTensorPolicyWorker",
            summary="FSDP2, tensor and context parallelism over DTensor, for any causal LM of transformers",
            api_version=1,
            capabilities=frozenset(
                {
                    Capability.DATA_PARALLEL,
                    Capability.TENSOR_PARALLEL,
                    Capability.SEQUENCE_PARALLEL,
                    Capability.CONTEXT_PARALLEL,
                    Capability.EXPERT_PARALLEL,
                    Capability.DYNAMIC_BATCHING,
                    Capability.PACKING,
                    Capability.ACTIVATION_CHECKPOINTING,
                    Capability.BFLOAT16,
                    Capability.REFERENCE_MODEL,
                    Capability.SCORING,
                    Capability.CPU_OFFLOAD,
                    Capability.EMBEDDED_GENERATION,
                    Capability.COLLECTIVE_REFIT,
                    Capability.IPC_REFIT,
                    Capability.LEARNED_POSITIONS,
                    Capability.PORTABLE_OPTIMIZER_STATE,
                    Capability.MUON,
                    Capability.LORA,
                    Capability.MULTIMODAL,
                    Capability.SHARDED_CHECKPOINTS,
                }
            ),
            config_model=DTensorConfig,
            check=check,
        )
    ]


@hookimpl
def rlframework_state_layout(config: RunConfig, worker: Any) -> Any:
    """Return what the engine keeps in memory on `worker`, if it is the run's."""
    if config.policy.backend != "dtensor":
        return None
    from rlframework_dtensor.state_layout import state_layout

    return state_layout(config, worker)

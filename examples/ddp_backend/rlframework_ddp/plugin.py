"""The record of the backend `ddp`. Imports no torch, because listing plugins imports it."""

from __future__ import annotations

from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import Capability, PolicyWorkerRecord

from rlframework_ddp.config import DdpConfig, check


@hookimpl
def rlframework_policy_workers() -> list[PolicyWorkerRecord]:
    """`policy.backend: ddp`."""
    return [
        PolicyWorkerRecord(
            name="ddp",
            target="rlframework_ddp.worker:DdpPolicyWorker",
            summary="full copies under torch's DistributedDataParallel, for any causal LM of transformers",
            api_version=1,
            capabilities=frozenset(
                {
                    Capability.DATA_PARALLEL,
                    Capability.DYNAMIC_BATCHING,
                    Capability.PACKING,
                    Capability.ACTIVATION_CHECKPOINTING,
                    Capability.BFLOAT16,
                    Capability.LEARNED_POSITIONS,
                    Capability.SCORING,
                    Capability.REFERENCE_MODEL,
                    Capability.EMBEDDED_GENERATION,
                    Capability.COLLECTIVE_REFIT,
                    Capability.IPC_REFIT,
                    Capability.PORTABLE_OPTIMIZER_STATE,
                }
            ),
            config_model=DdpConfig,
            check=check,
        )
    ]

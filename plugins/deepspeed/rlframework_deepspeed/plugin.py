"""The entry point: the record of the backend `deepspeed`. Imports no torch."""

from __future__ import annotations

from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import PolicyWorkerRecord
from rlframework_deepspeed.config import DeepSpeedConfig, check


@hookimpl
def rlframework_policy_workers() -> list[PolicyWorkerRecord]:
    """`policy.backend: deepspeed`, which declares nothing, because it cannot do anything yet."""
    return [
        PolicyWorkerRecord(
            name="deepspeed",
            target="rlframework_deepspeed.worker:DeepSpeedPolicyWorker",
            summary="DeepSpeed (ZeRO): comes in a later release, cannot train yet",
            api_version=1,
            config_model=DeepSpeedConfig,
            check=check,
        )
    ]

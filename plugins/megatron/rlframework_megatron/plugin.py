"""The entry point: the record of the backend `megatron`. Imports no torch."""

from __future__ import annotations

from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import PolicyWorkerRecord
from rlframework_megatron.config import MegatronConfig, check


@hookimpl
def rlframework_policy_workers() -> list[PolicyWorkerRecord]:
    """`policy.backend: megatron`, which declares nothing, because it cannot do anything yet."""
    return [
        PolicyWorkerRecord(
            name="megatron",
            target="rlframework_megatron.worker:MegatronPolicyWorker",
            summary="Megatron-core: comes in a later release, cannot train yet",
            api_version=1,
            config_model=MegatronConfig,
            check=check,
        )
    ]

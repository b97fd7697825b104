"""The policy worker of the backend `megatron`: core's, around `MegatronEngine`."""

from __future__ import annotations

from importlib.metadata import version

from rlframework.engine import PolicyWorkerBase, WorkerInfo
from rlframework_megatron.engine import MegatronEngine


class MegatronPolicyWorker(PolicyWorkerBase):
    """One process of the model. Constructor arguments: see `PolicyWorkerBase`."""

    engine_class = MegatronEngine

    def get_info(self) -> WorkerInfo:
        """See `PolicyWorker.get_info`."""
        info = super().get_info()
        info["versions"]["megatron-core"] = version("megatron-core")
        return info

"""The policy worker of the backend `ddp`: core's, around `DdpEngine`."""

from __future__ import annotations

from rlframework.engine import PolicyWorkerBase

from rlframework_ddp.engine import DdpEngine


class DdpPolicyWorker(PolicyWorkerBase):
    """One process of the model. Constructor arguments: see `PolicyWorkerBase`."""

    engine_class = DdpEngine

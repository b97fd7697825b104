"""The policy worker of the backend `deepspeed`: core's, around `DeepSpeedEngine`."""

from __future__ import annotations

from rlframework.engine import PolicyWorkerBase
from rlframework_deepspeed.engine import DeepSpeedEngine


class DeepSpeedPolicyWorker(PolicyWorkerBase):
    """One process of the model. Constructor arguments: see `PolicyWorkerBase`."""

    engine_class = DeepSpeedEngine

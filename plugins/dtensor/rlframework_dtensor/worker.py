"""The policy worker of the backend `dtensor`: core's, around `DTensorEngine`.

`get_cpu_state_dict` and `unshard_fsdp2_model` can be imported from here as in NeMo-RL.
"""

from __future__ import annotations

from rlframework.engine import PolicyWorkerBase
from rlframework_dtensor.engine import DTensorEngine
from rlframework_dtensor.nemo_rl import NeMoRLMethods, get_cpu_state_dict, unshard_fsdp2_model

__all__ = ["DTensorPolicyWorker", "get_cpu_state_dict", "unshard_fsdp2_model"]


class DTensorPolicyWorker(NeMoRLMethods, PolicyWorkerBase):
    """One process of the model, with the further methods of NeMo-RL's worker.

    Constructor arguments: see `PolicyWorkerBase`.
    """

    engine_class = DTensorEngine

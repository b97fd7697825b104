"""When FSDP sums gradients over the workers: in each microbatch's backward, or only in the last of a step."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule

from rlframework_dtensor.config import MEMORY_SHARE


class GradientReduction:
    """Tells the FSDP modules of a model, before each backward, what to do with gradients.

    Reducing once per step saves a reduce-scatter of all gradients for each further microbatch; until then FSDP keeps
    them unsharded, in fp32. Replicas (HSDP) exchange only shards, so they do it once in any case.
    """

    def __init__(self, model: FSDPModule, when: str, device: torch.device, tensor: int) -> None:
        """`when`: `policy.dtensor.reduce_gradients`; `tensor`: the number of workers that share each weight."""
        self._model = model
        self._once = when == "step" or (when == "auto" and _fits(model, device, tensor))

    def before_backward(self, *, last: bool) -> None:
        """Prepare the backward of a microbatch; `last`: of the last one of the step."""
        if self._once:
            self._model.set_requires_gradient_sync(last)
        else:
            self._model.set_requires_all_reduce(last)
        self._model.set_is_last_backward(last)


def _fits(model: FSDPModule, device: torch.device, tensor: int) -> bool:
    if device.type != "cuda":
        return False
    whole = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)  # type: ignore[attr-defined]
    return bool(MEMORY_SHARE * whole // tensor <= torch.cuda.get_device_properties(device).total_memory)

"""Backends that are broken on purpose in one place: parity must find the place."""

from __future__ import annotations

import torch

from rlframework.base.errors import BatchError
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import Capability, PolicyWorkerRecord, Problem
from rlframework_dtensor.engine import DTensorEngine
from rlframework_dtensor.worker import DTensorPolicyWorker

TENSOR = "model.layers.1.mlp.up_proj.weight"


class SmallUpdate(DTensorEngine):
    """The update of one tensor is half as large as it should be, from the second step on."""

    _steps = 0

    def clip_and_step(self, max_grad_norm, lr):
        weight = dict(self.model.named_parameters())[TENSOR]
        before = weight.detach().clone()
        result = super().clip_and_step(max_grad_norm, lr)
        self._steps += 1
        if self._steps > 1:
            with torch.no_grad():
                weight.lerp_(before, 0.5)
        return result


class Misloaded(DTensorEngine):
    """One tensor is not what the model's directory says."""

    def build(self, *, init_optimizer):
        super().build(init_optimizer=init_optimizer)
        with torch.no_grad():
            dict(self.model.named_parameters())[TENSOR][3, 2] += 0.1


class DoubleGradient(DTensorEngine):
    """The gradient is twice what it should be: the norm shows it, and clipping hides it in the weights."""

    def clip_and_step(self, max_grad_norm, lr):
        for parameter in self.model.parameters():
            parameter.grad *= 2
        return super().clip_and_step(max_grad_norm, lr)


class Dies(DTensorEngine):
    """It cannot be made."""

    def build(self, *, init_optimizer):
        raise RuntimeError("no engine in here")


class Refuses(DTensorPolicyWorker):
    """It takes no batch, and says that it is the batch's fault."""

    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        raise BatchError("I like none of it")


class SmallUpdateWorker(DTensorPolicyWorker):
    engine_class = SmallUpdate


class MisloadedWorker(DTensorPolicyWorker):
    engine_class = Misloaded


class DoubleGradientWorker(DTensorPolicyWorker):
    engine_class = DoubleGradient


class DiesWorker(DTensorPolicyWorker):
    engine_class = Dies


def not_yet(config, device):
    """The error of a backend that has only registered its name."""
    return [Problem("policy.backend", "tomorrow comes with a later release", "use another")]


@hookimpl
def rlframework_policy_workers():
    declared = frozenset({Capability.DATA_PARALLEL, Capability.PACKING, Capability.DYNAMIC_BATCHING})
    tomorrow = PolicyWorkerRecord(
        "tomorrow", "probe_parity_backends:DiesWorker", 1, capabilities=declared, check=not_yet
    )
    return [tomorrow] + [
        PolicyWorkerRecord(name, f"probe_parity_backends:{kind.__name__}", 1, capabilities=declared)
        for name, kind in {
            "small_update": SmallUpdateWorker,
            "misloaded": MisloadedWorker,
            "double_gradient": DoubleGradientWorker,
            "dies": DiesWorker,
            "refuses": Refuses,
        }.items()
    ]

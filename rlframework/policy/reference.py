"""The reference policy of a worker: a copy of the weights that it was built with, or the base model of adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlframework.base.errors import NotSupported
from rlframework.policy.engine import Engine
from rlframework.policy.host_buffers import HostBuffers


class SnapshotReference:
    """A copy of weights in CPU memory: those that the worker was built with, until `mix` or `take`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.weights = engine.snapshot()
        self._host = HostBuffers()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Context manager: swap in the reference; restore the policy on exit, also after an exception."""
        current = self._engine.swap(self.weights, self._host)
        try:
            yield
        finally:
            self._engine.restore(current)

    def mix(self, alpha: float) -> None:
        """Become `alpha` times the policy plus `1 - alpha` times this. Collective."""
        engine = self._engine
        current = engine.swap(self.weights, self._host)  # into the buffers of `use`, in place of a second copy
        engine.restore(current)
        if engine.device.type != "cpu":
            torch.get_device_module(engine.device).synchronize()  # both copies read memory of the CPU
        engine.mix(self.weights, current, alpha)

    def take(self) -> None:
        """Become the weights that the model has now."""
        self.weights = self._engine.snapshot()


class BaseReference:
    """The base model of adapters as the reference: the adapters are disabled, and no copy is kept."""

    def __init__(self, engine: Engine) -> None:
        self.use = engine.without_adapters


def require_copy(reference: SnapshotReference | BaseReference | None, purpose: str) -> SnapshotReference:
    """Return `reference` if it is a copy of weights; raise `NotSupported` otherwise."""
    if isinstance(reference, SnapshotReference):
        return reference
    why = (
        "it was built without one (init_reference_model=False)"
        if reference is None
        else "with policy.lora the reference is the base model without the adapters, which does not change"
    )
    raise NotSupported(f"{purpose} needs a reference policy with weights of its own, but this worker has none: {why}")

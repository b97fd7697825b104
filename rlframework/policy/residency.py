"""Offloading: model and optimizer are on the device or in CPU memory, depending on the phase of a step.

`PolicyWorkerBase` derives from `Memory`. A call that needs an offloaded part onloads it first; the four transitions
make the moves explicit and return the bytes moved. On a CPU nothing moves: 0 bytes. Not supported: offloading to disk.
"""

from __future__ import annotations

from abc import ABC
from typing import Any

import torch

from rlframework.config.policy import PolicyConfig
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.policy.engine import Engine

CPU = torch.device("cpu")
PARTS = ("model", "optimizer")


class Memory(Engine, PolicyWorker, ABC):
    """The transitions between phases, on the primitive `Engine.move`."""

    config: PolicyConfig
    device: torch.device
    _offloaded: set[str]
    """The members of `PARTS` that are in CPU memory."""

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> dict[str, int]:
        """See `PolicyWorker.prepare_for_training`."""
        return self._onload(*PARTS)

    def prepare_for_lp_inference(self) -> dict[str, int]:
        """See `PolicyWorker.prepare_for_lp_inference`."""
        offloaded = self._offload("optimizer") if self.config.offload.optimizer else {}
        return _add(offloaded, self._onload("model"))

    def offload_before_refit(self) -> dict[str, int]:
        """Offload the optimizer; return the bytes moved by part."""
        return self._offload("optimizer")

    def offload_after_refit(self) -> dict[str, int]:
        """Offload model and optimizer; return the bytes moved by part."""
        return self._offload(*PARTS)

    def _onload(self, *parts: str) -> dict[str, int]:
        """Onload those of `parts` that are offloaded; return the bytes moved by part."""
        moved = _add(*[self._move(part, self.device) for part in parts if part in self._offloaded])
        self._offloaded -= set(parts)
        return moved

    def _offload(self, *parts: str) -> dict[str, int]:
        moved = _add(*[self._move(part, CPU) for part in parts])
        self._offloaded |= set(parts)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # for other processes on the device
        return moved

    def _move(self, part: str, device: torch.device) -> dict[str, int]:
        return {part: self.move(device, model=part == "model", optimizer=part == "optimizer")}


def _add(*parts: dict[str, int]) -> dict[str, int]:
    """Sum bytes by part."""
    return {name: sum(part.get(name, 0) for part in parts) for name in PARTS}

"""Where model and optimizer lie between the phases of a step: on the device, or in CPU memory.

`PolicyWorkerBase` derives from it. A call that needs what is away brings it back by itself; the four transitions say
when, and tell the bytes that they moved. On a CPU there is nothing to move: 0 bytes. Left out: disks.
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
    """The transitions, on the primitive `Engine.move`."""

    config: PolicyConfig
    device: torch.device
    _away: set[str]
    """Of `PARTS`, what was sent to CPU memory."""

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> dict[str, int]:
        """See `PolicyWorker.prepare_for_training`."""
        return self._bring(*PARTS)

    def prepare_for_lp_inference(self) -> dict[str, int]:
        """See `PolicyWorker.prepare_for_lp_inference`."""
        sent = self._send_away("optimizer") if self.config.offload.optimizer else {}
        return _add(sent, self._bring("model"))

    def offload_before_refit(self) -> dict[str, int]:
        """See `PolicyWorker.offload_before_refit`."""
        return self._send_away("optimizer")

    def offload_after_refit(self) -> dict[str, int]:
        """See `PolicyWorker.offload_after_refit`."""
        return self._send_away(*PARTS)

    def _bring(self, *parts: str) -> dict[str, int]:
        """What of `parts` is away comes to the device."""
        moved = _add(*[self._move(part, self.device) for part in parts if part in self._away])
        self._away -= set(parts)
        return moved

    def _send_away(self, *parts: str) -> dict[str, int]:
        moved = _add(*[self._move(part, CPU) for part in parts])
        self._away |= set(parts)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # for whoever shares the device
        return moved

    def _move(self, part: str, device: torch.device) -> dict[str, int]:
        return {part: self.move(device, model=part == "model", optimizer=part == "optimizer")}


def _add(*parts: dict[str, int]) -> dict[str, int]:
    """Bytes by what they are of, over all `parts`."""
    return {name: sum(part.get(name, 0) for part in parts) for name in PARTS}

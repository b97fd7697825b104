"""State that a worker's services share: how far it has trained, where its model and optimizer are, and its memory.

Model and optimizer are on the device or in CPU memory, depending on the phase of a step. A call that needs an offloaded
part onloads it first; the transitions make the moves explicit. On a CPU nothing moves. Not supported: offloading to
disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from rlframework.base.errors import UserError
from rlframework.interfaces.policy_worker import BytesMoved
from rlframework.policy.device_memory import DeviceMemory
from rlframework.policy.engine import Engine

Part = Literal["model", "optimizer"]
CPU = torch.device("cpu")


@dataclass
class TrainingProgress:
    """How far a worker has trained.

    `train_calls`: calls of `train`, which the learning-rate schedule counts. `skipped_in_a_row`: consecutive steps
    skipped for a non-finite gradient. `weights_version`: changes of the weights, by a step or by loading.
    """

    train_calls: int = 0
    skipped_in_a_row: int = 0
    weights_version: int = 0


class Residency:
    """Where the model and the optimizer of an engine are. The methods return the bytes that they moved."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.memory = DeviceMemory(engine.device)
        """The memory of the engine's device, whose peaks each service counts to its phase."""
        self._offloaded: set[Part] = set()
        self._reference_in_use = False

    @contextmanager
    def holding_reference(self, swapped: AbstractContextManager[None]) -> Iterator[None]:
        """Context manager: enter `swapped`, in which the model has the weights of the reference."""
        with swapped:
            before, self._reference_in_use = self._reference_in_use, True
            try:
                yield
            finally:
                self._reference_in_use = before

    def require_policy(self, purpose: str) -> None:
        """Raise `UserError` if the model has the weights of the reference, with which `purpose` would be wrong."""
        if self._reference_in_use:
            raise UserError(
                f"{purpose} needs the weights of the policy, but inside use_reference_model the model has those of the "
                "reference: leave the block first"
            )

    def onload(self, *parts: Part) -> BytesMoved:
        """Onload those of `parts` that are offloaded."""
        moved = self._move([part for part in parts if part in self._offloaded], self._engine.device)
        self._offloaded -= set(parts)
        return moved

    def offload(self, *parts: Part) -> BytesMoved:
        """Move `parts` to CPU memory."""
        moved = self._move(parts, CPU)
        self._offloaded |= set(parts)
        if self._engine.device.type == "cuda":
            torch.cuda.empty_cache()  # for other processes on the device
        return moved

    def prepare_for_lp_inference(self) -> BytesMoved:
        """See `PolicyWorker.prepare_for_lp_inference`."""
        moved = self.onload("model")
        if self._engine.config.offload.optimizer:
            moved["optimizer"] = self.offload("optimizer")["optimizer"]
        return moved

    def _move(self, parts: Iterable[Part], device: torch.device) -> BytesMoved:
        moved: BytesMoved = {"model": 0, "optimizer": 0}
        for part in parts:
            moved[part] = self._engine.move(device, model=part == "model", optimizer=part == "optimizer")
        return moved

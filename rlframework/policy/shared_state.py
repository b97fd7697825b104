"""State that a worker's services share: how far it has trained, where its model and optimizer are, and its memory.

Model and optimizer are on the device or in CPU memory, depending on the phase of a step. A call that needs an offloaded
part onloads it first; the transitions make the moves explicit. On a CPU nothing moves. Not supported: offloading to
disk.

Memory is measured now, as peaks by phase of a step, and by what it holds: on a GPU that of torch's allocator, whose
counters are read without waiting for the device, on a CPU the resident memory of the whole process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from rlframework.base.errors import UserError
from rlframework.interfaces.policy_worker import BytesMoved
from rlframework.policy.engine import Engine

Phase = Literal["training", "scoring", "generation", "refit", "other"]


class DeviceMemory:
    """Measures the memory of a worker on `device`, in bytes.

    On a GPU peaks are by the phase in which they occurred: the allocator keeps one peak, which is noted and restarted
    whenever the phase changes. On a CPU, where not all systems can restart it, all peaks are of the phase "other".
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase: Phase = "other"
        self._peaks: dict[Phase, tuple[int, int]] = {}
        self._weights = self._at_rest = self._gradients = 0

    def now(self) -> tuple[int, int]:
        """Return the allocated and the reserved bytes; on a CPU, both are the resident memory."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        resident = psutil.Process().memory_info().rss
        return resident, resident

    def peaks(self) -> dict[Phase, tuple[int, int]]:
        """Return the peaks of allocated and of reserved bytes since the last `reset`, by phase."""
        self._note_peak()
        return dict(self._peaks)

    def peak(self) -> tuple[int, int]:
        """Return the peaks of allocated and of reserved bytes since the last `reset`, over all phases."""
        allocated, reserved = zip(*self.peaks().values(), strict=True)
        return max(allocated), max(reserved)

    def reset(self) -> None:
        """Restart the measurement of the peaks."""
        self._restart()
        self._peaks.clear()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Count peaks within the context to `phase`."""
        outer = self._phase
        self._enter(phase)
        try:
            yield
        finally:
            self._enter(outer)

    def model_built(self) -> None:
        """Take what is allocated now as the weights, with all that the engine allocates besides them."""
        self._weights = self.now()[0]

    def training_begins(self) -> None:
        """Take what is allocated now as what is there without gradients and activations: see `parts`."""
        self._at_rest = self.now()[0]

    @contextmanager
    def during_optimizer_step(self) -> Iterator[None]:
        """Context of a step of the optimizer, which uses up the gradients; without activations before and after."""
        if self._device.type != "cuda":
            yield
            return
        self._gradients = max(self.now()[0] - self._at_rest, 0)
        yield
        self._at_rest = self.now()[0]

    def parts(self) -> dict[str, int]:
        """Return the allocated bytes of weights, optimizer and gradients at the last optimizer step.

        `activations` are the rest of the peak of training, with temporary memory. Empty before a step, and on a CPU.
        """
        peak, _ = self.peaks().get("training", (0, 0))
        if not peak:
            return {}
        optimizer, rest = max(self._at_rest - self._weights, 0), peak - self._at_rest - self._gradients
        found = {"weights": self._weights, "optimizer": optimizer, "gradients": self._gradients}
        return {**found, "activations": max(rest, 0)}

    def _enter(self, phase: Phase) -> None:
        if phase != self._phase and self._device.type == "cuda":
            self._note_peak()
            self._restart()
            self._phase = phase

    def _note_peak(self) -> None:
        allocated, reserved = self._peaks.get(self._phase, (0, 0))
        if self._device.type == "cuda":
            new = torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)
        else:
            new = (max(peak_resident_bytes(), self.now()[0]),) * 2  # the kernel updates the two with a delay
        self._peaks[self._phase] = max(allocated, new[0]), max(reserved, new[1])

    def _restart(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            reset_peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the peak since the process started or `reset_peak_resident_bytes` (0 if the system does not report it)."""
    with suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def reset_peak_resident_bytes() -> None:
    """Reset the peak to the current value. Linux only, and not in some sandboxes: elsewhere the peak is unchanged."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")


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

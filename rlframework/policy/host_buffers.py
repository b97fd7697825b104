"""Buffers in CPU memory for the tensors of a device: offloaded weights and moments, and the policy during a swap.

Each tensor has one buffer, which is pinned and kept, so that only the first copy pays for it. Copies to and from pinned
memory run at the speed of the bus and do not block the host: a call waits for the device at most once.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping
from itertools import accumulate
from typing import Any, TypeVar
from weakref import finalize

import torch
from torch import Tensor

ALIGNMENT = 512
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process

Key = TypeVar("Key", bound=Hashable)
logger = logging.getLogger(__name__)


class HostBuffers:
    """Copies named tensors to the CPU and back; on a CPU nothing is kept, and each copy is a new tensor."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}

    @torch.no_grad()
    def fetch(self, tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Return copies of `tensors` in CPU memory, valid until the next call; waits once."""
        buffers = self._buffers(tensors)
        for key, tensor in tensors.items():
            buffers[key].copy_(tensor, non_blocking=True)
        if (device := _device_of(tensors)) is not None:
            torch.get_device_module(device).synchronize()
        return buffers

    @torch.no_grad()
    def exchange(self, tensors: Mapping[Key, Tensor], values: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Write `values`, in CPU memory, into `tensors`, and return what was there as `fetch` does.

        Does not wait. On a GPU a tensor is written while the next one is read, because the bus has both directions; a
        second copy on the device is not needed. The host may read the result once the device has finished.
        """
        buffers, device = self._buffers(tensors), _device_of(tensors)
        reading = _reading_stream(device)
        for key, tensor in tensors.items():
            if reading is None:
                buffers[key].copy_(tensor, non_blocking=True)
            else:
                with torch.cuda.stream(reading):
                    buffers[key].copy_(tensor, non_blocking=True)
                torch.cuda.current_stream(device).wait_event(reading.record_event())
            tensor.copy_(values[key], non_blocking=True)
        return buffers

    @torch.no_grad()
    def moved(self, tensors: Mapping[Key, Tensor], device: torch.device) -> dict[Key, Tensor]:
        """Return `tensors` on `device`: on the CPU in the kept buffers, elsewhere in new memory, without waiting."""
        if device.type == "cpu":
            return self.fetch(tensors)
        return {key: tensor.to(device, non_blocking=True) for key, tensor in tensors.items()}

    def move_in_place(
        self,
        weights: Iterable[Tensor],
        states: Iterable[dict[str, Any]],
        device: torch.device,
        *,
        scalars: bool = True,
    ) -> int:
        """Move the data of `weights`, and the tensors in `states` by name, to `device`; return the bytes moved.

        `scalars`: also tensors in `states` without dimensions, such as counts of steps.
        """
        weight_by_id = {id(weight): weight for weight in weights}
        state_by_id = {id(state): state for state in states}
        tensors: dict[tuple[int, str], Tensor] = {(number, ""): weight.data for number, weight in weight_by_id.items()}
        for number, state in state_by_id.items():
            values = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            tensors |= {(number, name): value for name, value in values.items() if scalars or value.ndim}
        elsewhere = {key: tensor for key, tensor in tensors.items() if tensor.device.type != device.type}
        for (number, name), tensor in self.moved(elsewhere, device).items():
            if number in weight_by_id:
                weight_by_id[number].data = tensor
            else:
                state_by_id[number][name] = tensor
        return sum(tensor.nbytes for tensor in elsewhere.values())

    def _buffers(self, tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """A buffer for each tensor: the kept one if it fits, and a new tensor for one that is on the CPU."""
        on_device = {key: tensor for key, tensor in tensors.items() if tensor.device.type != "cpu"}
        missing = {key: tensor for key, tensor in on_device.items() if not self._fits(key, tensor)}
        self._kept |= zip(missing, _pinned(list(missing.values())), strict=True)
        return {
            key: self._kept[key] if key in on_device else torch.empty_like(tensor) for key, tensor in tensors.items()
        }

    def _fits(self, key: Hashable, tensor: Tensor) -> bool:
        kept = self._kept.get(key)
        return kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype)


def _device_of(tensors: Mapping[Key, Tensor]) -> torch.device | None:
    return next((tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"), None)


def _reading_stream(device: torch.device | None) -> torch.cuda.Stream | None:
    if device is None or device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _pinned(tensors: list[Tensor]) -> list[Tensor]:
    """Empty CPU tensors for `tensors` of a device, each a storage of its own within one allocation, which is pinned.

    torch's own pinned memory is rounded up to a power of two for each tensor.
    """
    if not tensors:
        return []
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    if tensors[0].is_cuda:
        _pin(memory, tensors[0].device)
    offsets = accumulate(sizes, initial=0)
    return [_part(memory, offset, tensor) for offset, tensor in zip(offsets, tensors, strict=False)]


def _part(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    flat = torch.frombuffer(memory.numpy(), dtype=like.dtype, count=like.numel(), offset=offset)  # keeps `memory`
    return flat.view(like.shape)


def _pin(memory: Tensor, device: torch.device) -> None:
    runtime = torch.cuda.cudart()
    address = memory.data_ptr()
    code = int(runtime.cudaHostRegister(address, memory.nbytes, PORTABLE))
    if code:
        logger.warning(
            "%.1f GiB of CPU memory cannot be pinned (CUDA error %d): moving weights between the GPU and the CPU is "
            "slower",
            memory.nbytes / 2**30,
            code,
        )
        return

    def unpin() -> None:
        torch.cuda.synchronize(device)  # copies may still use it
        runtime.cudaHostUnregister(address)

    finalize(memory, unpin).atexit = False

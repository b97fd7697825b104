"""Microbatches that are made, and copied to a device, when an engine asks for them.

An engine launches the kernels of a microbatch without waiting for them, and asks for the next one. So the next one is
made while the device computes, and the device holds those that run, not all of a batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor

from rlframework.batch.batch_rows import copy_to
from rlframework.interfaces.data_processor import Microbatch


class _OnDemand(Sequence[Microbatch]):
    @abstractmethod
    def _at(self, index: int) -> Microbatch: ...

    @overload
    def __getitem__(self, index: int) -> Microbatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[Microbatch]: ...
    def __getitem__(self, index: int | slice) -> Microbatch | list[Microbatch]:
        if isinstance(index, slice):
            return [self._at(number) for number in range(len(self))[index]]
        return self._at(range(len(self))[index])


class Made(_OnDemand):
    """`count` microbatches: `make(index)` is called when one is first asked for, and its result kept."""

    def __init__(self, count: int, make: Callable[[int], Microbatch]) -> None:
        self._made: list[Microbatch | None] = [None] * count
        self._make = make

    def __len__(self) -> int:
        return len(self._made)

    def _at(self, index: int) -> Microbatch:
        made = self._made[index]
        if made is None:
            made = self._made[index] = self._make(index)
        return made


class OnDevice(_OnDemand):
    """Copies of `host` on `device`, a new one whenever one is asked for."""

    def __init__(self, host: Sequence[Microbatch], device: torch.device) -> None:
        self.host, self._device = host, device

    def __len__(self) -> int:
        return len(self.host)

    def _at(self, index: int) -> Microbatch:
        return to_device(self.host[index], self._device)


def on_device(microbatches: Sequence[Microbatch], device: torch.device) -> Sequence[Microbatch]:
    """Return `microbatches`, which are in CPU memory, as a sequence that copies each to `device` on demand."""
    return microbatches if device.type == "cpu" else OnDevice(microbatches, device)


def on_host(microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
    """Return `microbatches` in CPU memory, if the worker has them there, to look at without copying them."""
    return microbatches.host if isinstance(microbatches, OnDevice) else microbatches


def to_device(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """Return a copy of `microbatch` with its tensors on `device`, except `rows` and `cu_seqlens`."""
    inputs, data = microbatch.processed_inputs, microbatch.data_dict
    positions = inputs.position_ids
    moved = {key: copy_to(value, device) if isinstance(value, Tensor) else value for key, value in data.items()}
    return replace(
        microbatch,
        data_dict=type(data)(moved).to(device),  # media
        processed_inputs=replace(
            inputs,
            input_ids=copy_to(inputs.input_ids, device),
            position_ids=None if positions is None else copy_to(positions, device),
            vlm_kwargs={name: copy_to(value, device) for name, value in inputs.vlm_kwargs.items()},
        ),
        head_positions=copy_to(microbatch.head_positions, device),
        targets=copy_to(microbatch.targets, device),
        scatter=copy_to(microbatch.scatter, device),
        host=microbatch,
    )

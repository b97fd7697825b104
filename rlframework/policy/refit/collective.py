"""Collective refit: weights packed into large buffers of bytes, broadcast by trainer rank 0 to all receivers.

Both sides work out from names, shapes and dtypes what lies where. Two buffers are used in turn, so that one is packed
or unpacked while the other is on its way. What is sent, in this order:

    header      checksum of the layout, bytes of a group, number of groups
    each group  its weights, and behind them the checksum of each
    verdict     the number of receivers that found something wrong, added up over all ranks

A receiver that finds something wrong takes the rest all the same, so that the group stays in step and can be used for
the next refit. After a dead or late rank it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlframework.errors import RefitError
from rlframework.policy.refit.packing import (
    Info,
    Slot,
    aligned,
    bytes_of,
    group_names,
    layout_checksum,
    place,
    room_for,
)
from rlframework.policy.refit.process_group import RefitGroup
from rlframework.policy.refit.sharing import put_in_order

_CHECKSUM = 8
_SIGN = 2**64


class _Buffers:
    """Two buffers, used in turn, each with what is on its way in it."""

    def __init__(self, group: RefitGroup) -> None:
        self._group = group
        self._raw: list[Tensor | None] = [None, None]
        self._works: list[Any] = [None, None]

    def get(self, number: int, size: int) -> Tensor:
        """The buffer of group `number`, once it is free."""
        self.arrived(number)
        turn = number % 2
        raw = self._raw[turn]
        if raw is None or raw.numel() < size:
            self._raw[turn] = raw = torch.empty(size, dtype=torch.uint8, device=self._group.device)
        return raw[:size]

    def go(self, number: int, raw: Tensor) -> None:
        """Begin to broadcast it."""
        self._works[number % 2] = self._group.broadcast(raw)

    def arrived(self, number: int) -> None:
        """Wait until it is there, or sent."""
        work, self._works[number % 2] = self._works[number % 2], None
        if work is not None:
            self._group.wait(work, f"sending weights, group {number + 1}" if self._group.rank == 0 else "weights")


def send(group: RefitGroup, info: Info, weights: Iterator[tuple[str, Tensor]], budget: float) -> None:
    """Rank 0: send `weights`, which come in the order of `info`, in groups of at most `budget` bytes.

    A `RefitError` where a receiver is gone or late, or found something wrong.
    """
    try:
        _send_groups(group, info, weights, budget)
    except BaseException:  # the receivers wait for what does not come
        group.close()
        raise
    wrong = torch.zeros(1, dtype=torch.int64, device=group.device)
    group.wait(group.add(wrong), "asking the receivers whether all is right")
    if int(wrong):
        raise RefitError(
            f"{int(wrong)} of {group.size - 1} receivers found that weights are not as they were sent; what was wrong "
            "is told where they are"
        )


def _send_groups(group: RefitGroup, info: Info, weights: Iterator[tuple[str, Tensor]], budget: float) -> None:
    groups = _grouped(info, budget)
    header = [_signed(layout_checksum(info)), int(budget), len(groups), 0]
    group.wait(group.broadcast(torch.tensor(header, device=group.device)), "sending the layout of weights")
    buffers = _Buffers(group)
    for number, slots in enumerate(groups):
        raw = buffers.get(number, _size(slots))
        sums = list(put_in_order(slots, weights, raw))
        _sums_of(raw, slots).copy_(torch.tensor([_signed(value) for value in sums], dtype=torch.int64))
        buffers.go(number, raw)
    for number in range(len(groups), len(groups) + 2):
        buffers.arrived(number)


def receive(group: RefitGroup, info: Info, arrived: Callable[[Slot, Tensor, int], None]) -> None:
    """The others: call `arrived` with each weight's slot, its bytes, and its checksum at the sender.

    The first error that it raises is raised when all is over. A `RefitError` where the sender is gone, late, or sends
    other weights than `info`.
    """
    header = torch.zeros(4, dtype=torch.int64, device=group.device)
    group.wait(group.broadcast(header), "the layout of weights")
    layout, budget, count, _ = header.tolist()
    groups = _grouped(info, budget)
    if (layout, count) != (_signed(layout_checksum(info)), len(groups)):
        group.close()
        raise RefitError("the trainer sends other weights than prepare_refit_info told: call that again")
    error: Exception | None = None
    buffers = _Buffers(group)

    def begin(number: int) -> Tensor:
        raw = buffers.get(number, _size(groups[number]))
        buffers.go(number, raw)
        return raw

    raws = {number: begin(number) for number in range(min(2, len(groups)))}
    for number, slots in enumerate(groups):
        buffers.arrived(number)
        raw = raws.pop(number)
        for slot, value in zip(slots, _sums_of(raw, slots).tolist(), strict=True):
            try:
                if error is None:
                    arrived(slot, slot.of(raw), value % _SIGN)
            except Exception as found:  # noqa: BLE001 - raised below, when the sender knows
                error = found
        if number + 2 < len(groups):
            raws[number + 2] = begin(number + 2)
    group.wait(group.add(torch.tensor([int(error is not None)], device=group.device)), "telling that all is right")
    if error is not None:
        raise error


def _grouped(info: Info, budget: float) -> list[list[Slot]]:
    sizes = ((name, bytes_of(shape, dtype)) for name, (shape, dtype) in info.items())
    return [place(names, info) for names in group_names(sizes, budget)]


def _size(slots: Sequence[Slot]) -> int:
    return aligned(room_for(slots)) + _CHECKSUM * len(slots)


def _sums_of(raw: Tensor, slots: Sequence[Slot]) -> Tensor:
    start = aligned(room_for(slots))
    return raw[start : start + _CHECKSUM * len(slots)].view(torch.int64)


def _signed(value: int) -> int:
    """The same 64 bits as a signed number."""
    return value - _SIGN if value >= _SIGN // 2 else value

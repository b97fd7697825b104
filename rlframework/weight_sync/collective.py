"""Collective refit: weights broadcast by trainer rank 0 to all receivers.

Both sides work out from names, shapes and dtypes what comes in which message. A large weight goes alone: from where it
is, where it need not be cast, to where the receiver wants it. Small ones are packed. Two messages are on their way at
a time, while checksums of others are taken. What is sent, in this order:

    header      checksum of the layout, bytes of a group, number of groups
    each group  its weights
    checksums   of all weights
    verdict     the number of receivers that found something wrong, added up over all ranks

A receiver that finds something wrong takes the rest all the same, so that the group stays in step and can be used for
the next refit. After a dead or late rank it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rlframework.errors import RefitError
from rlframework.weight_sync.buffers import Info, Slot, bytes_of, checksum, group_names, layout_checksum, place, put
from rlframework.weight_sync.ipc import in_order
from rlframework.weight_sync.process_group import RefitGroup

_LARGE = 1 << 20
"""Bytes of a weight that goes alone: a message costs less than to copy it twice."""

_SIGN = 2**64
_Result = TypeVar("_Result")


class Receiver(Protocol):
    """Where weights arrive."""

    def room(self, slot: Slot) -> Tensor:
        """Bytes that the weight may be written to, uint8 of one dimension."""

    def hold(self, slot: Slot, raw: Tensor) -> int:
        """Take the weight, which is in `raw`; its checksum."""

    def accept(self, name: str, arrived: int, sent: int) -> None:
        """Compare checksums. The last weight ends the refit."""


class _OnTheWay:
    """At most two messages, in turn, and a buffer for each, for what needs one."""

    def __init__(self, group: RefitGroup) -> None:
        self._group = group
        self._buffers: list[Tensor | None] = [None, None]
        self._going: list[tuple[Any, Tensor] | None] = [None, None]

    def buffer(self, number: int, slots: Sequence[Slot]) -> Tensor:
        """For message `number`, when the one before the last has arrived."""
        turn, size = number % 2, max(1, slots[-1].offset + slots[-1].size)
        raw = self._buffers[turn]
        if raw is None or raw.numel() < size:
            self._buffers[turn] = raw = torch.empty(size, dtype=torch.uint8, device=self._group.device)
        return raw[:size]

    def go(self, number: int, raw: Tensor) -> None:
        """Begin to broadcast it. `raw` is kept until it has arrived."""
        self._going[number % 2] = self._group.broadcast(raw), raw

    def arrived(self, number: int) -> Tensor | None:
        """Wait until the message whose turn it was is there, or sent: what it is; None where there was none."""
        going, self._going[number % 2] = self._going[number % 2], None
        if going is None:
            return None
        self._group.wait(going[0], "sending weights" if self._group.rank == 0 else "weights")
        return going[1]


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
    on_the_way = _OnTheWay(group)
    sums: list[int] = []
    for number, slots in enumerate(groups):
        on_the_way.arrived(number)
        given = in_order(slots, weights)
        if len(slots) == 1:
            slot, weight = next(given)
            raw = _as_it_is(weight, slot.dtype, group.device)
            if raw is not None:
                on_the_way.go(number, raw)
                sums.append(checksum(raw))
                continue
            given = iter([(slot, weight)])
        raw = on_the_way.buffer(number, slots)
        sums += [put(slot.of(raw), weight, slot.dtype) for slot, weight in given]
        on_the_way.go(number, raw)
    for number in range(len(groups), len(groups) + 2):
        on_the_way.arrived(number)
    told = torch.tensor([_signed(value) for value in sums], dtype=torch.int64, device=group.device)
    group.wait(group.broadcast(told), "sending the checksums of weights")


def _as_it_is(weight: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The bytes of `weight`, where they can be sent from where they are."""
    if weight.dtype != dtype or weight.device.type != device.type or not weight.is_contiguous() or not weight.numel():
        return None
    return weight.detach().view(-1).view(torch.uint8)


class _Attempts:
    """Calls after the first that fails are not made."""

    error: Exception | None = None

    def __call__(self, call: Callable[..., _Result], *arguments: Any) -> _Result | None:
        if self.error is None:
            try:
                return call(*arguments)
            except Exception as error:  # noqa: BLE001 - raised when the sender knows
                self.error = error
        return None


def receive(group: RefitGroup, info: Info, receiver: Receiver) -> None:
    """The others: give `receiver` each weight, and what its checksum is at the sender.

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
    attempt = _Attempts()
    held = _receive_groups(group, groups, receiver, attempt)
    told = torch.zeros(len(held), dtype=torch.int64, device=group.device)
    group.wait(group.broadcast(told), "the checksums of weights")
    for (name, arrived), sent in zip(held, told.tolist(), strict=True):
        attempt(receiver.accept, name, arrived, sent % _SIGN)
    wrong = torch.tensor([int(attempt.error is not None)], device=group.device)
    group.wait(group.add(wrong), "telling whether all is right")
    if attempt.error is not None:
        raise attempt.error


def _receive_groups(
    group: RefitGroup, groups: Sequence[Sequence[Slot]], receiver: Receiver, attempt: _Attempts
) -> list[tuple[str, int | None]]:
    """Names of all weights, and their checksums here, as far as nothing was wrong."""
    on_the_way = _OnTheWay(group)
    held: list[tuple[str, int | None]] = []

    def begin(number: int) -> None:
        slots = groups[number]
        raw = attempt(receiver.room, slots[0]) if len(slots) == 1 else None
        if raw is None or raw.device.type != group.device.type or not raw.numel():
            raw = on_the_way.buffer(number, slots)
        on_the_way.go(number, raw)

    for number in range(min(2, len(groups))):
        begin(number)
    for number, slots in enumerate(groups):
        raw = on_the_way.arrived(number)
        assert raw is not None
        held += [(slot.name, attempt(receiver.hold, slot, slot.of(raw))) for slot in slots]
        if number + 2 < len(groups):
            begin(number + 2)
    return held


def _grouped(info: Info, budget: float) -> list[list[Slot]]:
    """What goes in each message: large weights alone, small ones together, at most `budget` bytes."""
    sizes = [(name, bytes_of(shape, dtype)) for name, (shape, dtype) in info.items()]
    groups: list[list[str]] = []
    for large, some in groupby(sizes, lambda size: size[1] >= _LARGE):
        these = list(some)
        groups += [[name] for name, _ in these] if large else group_names(these, budget)
    return [place(names, info) for names in groups]


def _signed(value: int) -> int:
    """The same 64 bits as a signed number."""
    return value - _SIGN if value >= _SIGN // 2 else value

"""Collective refit: weights broadcast by trainer rank 0 to all receivers.

Both sides derive the messages from names, shapes and dtypes. A large weight is sent as one message, from the trainer's
memory (unless it must be cast) straight into the receiver's target. Small weights are packed together. Up to two
messages are in flight while checksums are computed. The protocol, in order:

    header      layout checksum, bytes per group, number of groups
    groups      the weights
    checksums   of all weights
    verdict     the number of receivers that found an error, summed over all ranks

A receiver that finds an error still receives the rest, so the process group stays in sync and can be used for the next
refit. If a rank dies or is late, the group cannot be used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rlframework.errors import RefitError
from rlframework.weight_sync.buffers import (
    Slot,
    WeightInfo,
    assign_slots,
    checksum,
    group_names,
    layout_checksum,
    sizes_of,
    write_weight,
)
from rlframework.weight_sync.ipc import match_slots
from rlframework.weight_sync.process_group import RefitGroup

_LARGE = 1 << 20
"""Weights of at least this many bytes are sent alone: one more message costs less than two copies."""

_MODULUS = 2**64
_Result = TypeVar("_Result")


class Receiver(Protocol):
    """The destination of received weights."""

    def target(self, slot: Slot) -> Tensor:
        """Return the bytes that the weight may be received into, 1-D uint8."""

    def receive(self, slot: Slot, raw: Tensor) -> int:
        """Copy the weight in from `raw`; return its checksum."""

    def verify(self, name: str, received: int, sent: int) -> None:
        """Compare the checksums of a weight. Verifying the last weight ends the refit."""


class _InFlight:
    """At most two messages in flight, each with a buffer if it needs one."""

    def __init__(self, group: RefitGroup) -> None:
        self._group = group
        self._buffers: list[Tensor | None] = [None, None]
        self._pending: list[tuple[Any, Tensor] | None] = [None, None]

    def buffer(self, number: int, slots: Sequence[Slot]) -> Tensor:
        """Return the buffer for message `number`; message `number - 2`, which used it before, must be complete."""
        turn, size = number % 2, max(1, slots[-1].offset + slots[-1].size)
        raw = self._buffers[turn]
        if raw is None or raw.numel() < size:
            self._buffers[turn] = raw = torch.empty(size, dtype=torch.uint8, device=self._group.device)
        return raw[:size]

    def start(self, number: int, raw: Tensor) -> None:
        """Start broadcasting message `number`; keeps `raw` alive until it is complete."""
        self._pending[number % 2] = self._group.broadcast(raw), raw

    def finish(self, number: int) -> Tensor | None:
        """Wait for the message in the slot of message `number` and return its bytes; None if the slot is empty."""
        pending, self._pending[number % 2] = self._pending[number % 2], None
        if pending is None:
            return None
        self._group.wait(pending[0], "sending weights" if self._group.rank == 0 else "receiving weights")
        return pending[1]


def send(group: RefitGroup, info: WeightInfo, weights: Iterator[tuple[str, Tensor]], budget: float) -> None:
    """Send `weights`, given in the order of `info`, in groups of at most `budget` bytes; called on rank 0.

    Raises `RefitError` if a receiver is gone or late, or found an error.
    """
    try:
        _send_groups(group, info, weights, budget)
    except BaseException:  # the receivers are waiting for messages that will never arrive
        group.close()
        raise
    failures = torch.zeros(1, dtype=torch.int64, device=group.device)
    group.wait(group.all_reduce(failures), "collecting the receivers' verdicts")
    if int(failures):
        raise RefitError(
            f"{int(failures)} of {group.size - 1} receivers rejected the weights of this refit; each reports the reason"
        )


def _send_groups(group: RefitGroup, info: WeightInfo, weights: Iterator[tuple[str, Tensor]], budget: float) -> None:
    groups = _message_slots(info, budget)
    header = [_signed(layout_checksum(info)), int(budget), len(groups), 0]
    group.wait(group.broadcast(torch.tensor(header, device=group.device)), "sending the layout of the weights")
    in_flight = _InFlight(group)
    sums: list[int] = []
    for number, slots in enumerate(groups):
        in_flight.finish(number)
        matched = match_slots(slots, weights)
        if len(slots) == 1:
            slot, weight = next(matched)
            raw = _bytes_in_place(weight, slot.dtype, group.device)
            if raw is not None:
                in_flight.start(number, raw)
                sums.append(checksum(raw))
                continue
            matched = iter([(slot, weight)])
        raw = in_flight.buffer(number, slots)
        sums += [write_weight(slot.of(raw), weight, slot.dtype) for slot, weight in matched]
        in_flight.start(number, raw)
    for number in range(len(groups), len(groups) + 2):
        in_flight.finish(number)
    checksums = torch.tensor([_signed(value) for value in sums], dtype=torch.int64, device=group.device)
    group.wait(group.broadcast(checksums), "sending the checksums of the weights")


def _bytes_in_place(weight: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return the bytes of `weight` if they can be sent without a copy."""
    if weight.dtype != dtype or weight.device.type != device.type or not weight.is_contiguous() or not weight.numel():
        return None
    return weight.detach().view(-1).view(torch.uint8)


class _UntilFirstError:
    """Makes calls until one fails, skips those after it, and keeps the error."""

    error: Exception | None = None

    def __call__(self, call: Callable[..., _Result], *arguments: Any) -> _Result | None:
        if self.error is None:
            try:
                return call(*arguments)
            except Exception as error:  # noqa: BLE001 - raised once the sender knows
                self.error = error
        return None


def receive(group: RefitGroup, info: WeightInfo, receiver: Receiver) -> None:
    """Receive all weights and their checksums into `receiver`; called on every rank except 0.

    Raises the first error of `receiver` after the last message. Raises `RefitError` if the sender is gone or late, or
    sends weights other than `info`.
    """
    header = torch.zeros(4, dtype=torch.int64, device=group.device)
    group.wait(group.broadcast(header), "receiving the layout of the weights")
    layout, budget, count, _ = header.tolist()
    groups = _message_slots(info, budget)
    if (layout, count) != (_signed(layout_checksum(info)), len(groups)):
        group.close()
        raise RefitError(
            "the trainer sends weights other than those announced by prepare_refit_info: call prepare_refit_info again"
        )
    attempt = _UntilFirstError()
    received = _receive_groups(group, groups, receiver, attempt)
    checksums = torch.zeros(len(received), dtype=torch.int64, device=group.device)
    group.wait(group.broadcast(checksums), "receiving the checksums of the weights")
    for (name, checksum_here), sent in zip(received, checksums.tolist(), strict=True):
        attempt(receiver.verify, name, checksum_here, sent % _MODULUS)
    failed = torch.tensor([int(attempt.error is not None)], device=group.device)
    group.wait(group.all_reduce(failed), "sending this receiver's verdict")
    if attempt.error is not None:
        raise attempt.error


def _receive_groups(
    group: RefitGroup, groups: Sequence[Sequence[Slot]], receiver: Receiver, attempt: _UntilFirstError
) -> list[tuple[str, int | None]]:
    """Return all names with the checksums of what arrived; None from the first error on."""
    in_flight = _InFlight(group)
    received: list[tuple[str, int | None]] = []

    def start(number: int) -> None:
        slots = groups[number]
        raw = attempt(receiver.target, slots[0]) if len(slots) == 1 else None
        if raw is None or raw.device.type != group.device.type or not raw.numel():
            raw = in_flight.buffer(number, slots)
        in_flight.start(number, raw)

    for number in range(min(2, len(groups))):
        start(number)
    for number, slots in enumerate(groups):
        raw = in_flight.finish(number)
        assert raw is not None
        received += [(slot.name, attempt(receiver.receive, slot, slot.of(raw))) for slot in slots]
        if number + 2 < len(groups):
            start(number + 2)
    return received


def _message_slots(info: WeightInfo, budget: float) -> list[list[Slot]]:
    """Assign weights to messages: each large one alone, small ones packed up to `budget` bytes."""
    groups: list[list[str]] = []
    for large, run in groupby(sizes_of(info), lambda size: size[1] >= _LARGE):
        weights = list(run)
        groups += [[name] for name, _ in weights] if large else group_names(weights, budget)
    return [assign_slots(names, info) for names in groups]


def _signed(value: int) -> int:
    """Reinterpret an unsigned 64-bit number as signed."""
    return value - _MODULUS if value >= _MODULUS // 2 else value

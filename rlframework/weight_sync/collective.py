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

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import cycle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework.base.errors import RefitError
from rlframework.weight_sync import buffers, rendezvous
from rlframework.weight_sync.buffers import Slot, WeightInfo

_LARGE = 1 << 20  # weights of at least this many bytes are sent alone: one more message costs less than two copies
_MODULUS = 2**64
_Result = TypeVar("_Result")


class RefitGroup:
    """Rank `rank` of `world_size` in a process group of trainer rank 0 and the receivers, separate from their own.

    gloo between CPUs, NCCL between GPUs. Rank 0, the sender, serves the store at `ip` and `port`; `listening` is a
    socket already bound to it. Every wait has the `deadline` in seconds. Raises `RefitError` if the ranks do not meet.
    """

    def __init__(
        self,
        ip: str,
        port: int,
        rank: int,
        world_size: int,
        device: torch.device,
        deadline: float,
        listening: socket.socket | None = None,
    ) -> None:
        self.rank, self.size, self.deadline, self.device = rank, world_size, deadline, device
        self._group: Any = None
        try:
            self._group = self._join(ip, port, listening)
            if device.type == "cuda":  # NCCL connects at the first collective: errors are reported now
                self.sum(torch.zeros(1, dtype=torch.int64, device=device), "connecting")
        except (RuntimeError, OSError) as error:
            raise RefitError(
                f"rank {rank} of {world_size} could not form the process group of the refit at {ip}:{port} within "
                f"{deadline:g} s (generation.refit.deadline): {rendezvous.first_line(error)}"
            ) from error

    def _join(self, ip: str, port: int, listening: socket.socket | None) -> Any:
        rank, size, seconds = self.rank, self.size, self.deadline
        store = rendezvous.serve_store(ip, port, rank, size, seconds, listening)
        if self.device.type == "cuda":
            return rendezvous.connect_gpus(store, rank, size, seconds)
        address = rendezvous.own_address(ip, port) if rank else ip
        return rendezvous.connect_cpus(store, rank, size, address, seconds)

    def start_broadcast(self, tensor: Tensor) -> dist.Work:
        """Start sending `tensor` from rank 0 to the others; pass the result to `wait`."""
        work: dist.Work = self._group.broadcast(tensor, 0)
        return work

    def broadcast(self, tensor: Tensor, what: str) -> None:
        """Send `tensor` from rank 0 to the others; errors begin with `what`."""
        self.wait(self.start_broadcast(tensor), what)

    def sum(self, tensor: Tensor, what: str) -> None:
        """Sum `tensor` over the ranks, in place; errors begin with `what`."""
        self.wait(self._group.allreduce(tensor), what)

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait for `work`; close the group and raise `RefitError` if a rank is gone or the deadline passes."""
        try:
            until = time.monotonic() + self.deadline
            if self.device.type == "cpu":
                work.wait(timedelta(seconds=self.deadline))
            while self.device.type == "cuda" and not work.is_completed():
                if time.monotonic() > until:
                    raise RuntimeError("deadline exceeded")
                time.sleep(0.001)
            if self.device.type == "cuda":
                work.wait()  # complete, also after an error of the connection
                self._require_success()
        except RuntimeError as error:
            self.close()
            who = "a receiver is gone or took too long" if self.rank == 0 else "the trainer is gone or took too long"
            raise RefitError(
                f"{what}: {who} (generation.refit.deadline is {self.deadline:g} s): {rendezvous.first_line(error)}"
            ) from error

    def _require_success(self) -> None:
        """Raise a RuntimeError if NCCL lost a connection. What arrived before the error is detected by checksums."""
        from torch._C._distributed_c10d import ErrorType  # not in a torch without distributed

        error = self._group.get_error()
        if error != ErrorType.SUCCESS:
            raise RuntimeError(f"NCCL: {error}")

    @property
    def closed(self) -> bool:
        """True after `close` or a failure."""
        return self._group is None

    def close(self) -> None:
        """Release the group; the other ranks notice."""
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            with suppress(RuntimeError):
                group.abort()


# -- messages ----------------------------------------------------------------------------------------------------------


class _Message:
    """One of the two messages in flight, with a buffer if it needs one."""

    def __init__(self, group: RefitGroup) -> None:
        self._group = group
        self._buffer = torch.empty(0, dtype=torch.uint8, device=group.device)
        self._pending: tuple[dist.Work, Tensor] | None = None

    def buffer(self, slots: Sequence[Slot]) -> Tensor:
        size = max(1, slots[-1].offset + slots[-1].size)  # not padded: the other side may need no buffer
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._group.device)
        return self._buffer[:size]

    def start(self, raw: Tensor) -> None:
        self._pending = self._group.start_broadcast(raw), raw  # keeps `raw` alive until it is complete

    def finish(self) -> Tensor:
        """Wait for the message and return its bytes; none if there is no message."""
        if self._pending is None:
            return self._buffer[:0]
        (work, raw), self._pending = self._pending, None
        self._group.wait(work, "sending weights" if self._group.rank == 0 else "receiving weights")
        return raw


def _message_slots(info: WeightInfo, budget: float) -> list[list[Slot]]:
    """Assign weights to messages: each large one alone, small ones packed up to `budget` bytes."""
    return [buffers.assign_slots(names, info) for names in buffers.group_names(buffers.sizes_of(info), budget, _LARGE)]


def _signed(value: int) -> int:
    """Reinterpret an unsigned 64-bit number as signed."""
    return value - _MODULUS if value >= _MODULUS // 2 else value


# -- the two sides -----------------------------------------------------------------------------------------------------


def send(group: RefitGroup, info: WeightInfo, weights: Iterator[tuple[str, Tensor]], budget: float) -> list[int]:
    """Send `weights`, given in the order of `info`, in groups of at most `budget` bytes; return their checksums.

    Called on rank 0.

    Raises `RefitError` if a receiver is gone or late, or found an error.
    """
    try:
        groups = _message_slots(info, budget)
        header = [_signed(buffers.layout_checksum(info)), int(budget), len(groups), 0]
        group.broadcast(torch.tensor(header, device=group.device), "sending the layout of the weights")
        sums = _send_groups(group, groups, weights)
        signed = torch.tensor(list(map(_signed, sums)), dtype=torch.int64)
        group.broadcast(signed.to(group.device), "sending the checksums of the weights")
    except BaseException:  # the receivers are waiting for messages that will never arrive
        group.close()
        raise
    failures = torch.zeros(1, dtype=torch.int64, device=group.device)
    group.sum(failures, "collecting the receivers' verdicts")
    if int(failures):
        raise RefitError(
            f"{int(failures)} of {group.size - 1} receivers rejected the weights of this refit; each reports the reason"
        )
    return sums


def _send_groups(
    group: RefitGroup, groups: Sequence[Sequence[Slot]], weights: Iterator[tuple[str, Tensor]]
) -> list[int]:
    """Send the weights and return their checksums."""
    messages = _Message(group), _Message(group)
    sums: list[int] = []
    for slots, message in zip(groups, cycle(messages), strict=False):
        message.finish()
        matched = buffers.match_slots(slots, weights)
        if len(slots) == 1:
            slot, weight = next(matched)
            same = weight.dtype == slot.dtype and weight.device.type == group.device.type
            if same and weight.is_contiguous() and weight.numel():
                message.start(raw := buffers.as_bytes(weight))
                sums.append(buffers.checksum(raw))
                continue
            matched = iter([(slot, weight)])
        raw = message.buffer(slots)
        sums += [buffers.write_weight(slot.of(raw), weight, slot.dtype) for slot, weight in matched]
        message.start(raw)
    for message in messages:
        message.finish()
    return sums


def receive(
    group: RefitGroup, info: WeightInfo, target: Callable[[str], Tensor], verify: Callable[[str, int, int], None]
) -> None:
    """Receive all weights; called on every rank except 0.

    `target` returns the tensor to fill by name; `verify` compares the checksums received and sent, after the last
    weight. Raises their first error after the last message. Raises `RefitError` if the sender is gone or late, or sends
    weights other than `info`.
    """
    header = torch.zeros(4, dtype=torch.int64, device=group.device)
    group.broadcast(header, "receiving the layout of the weights")
    layout, budget, count, _ = header.tolist()
    groups = _message_slots(info, budget)
    if (layout, count) != (_signed(buffers.layout_checksum(info)), len(groups)):
        group.close()
        raise RefitError(
            "the trainer sends weights other than those announced by begin_weight_update: begin the update again"
        )
    errors: list[Exception] = []

    def attempt(call: Callable[..., _Result], *arguments: Any) -> _Result | None:
        try:
            return call(*arguments)
        except Exception as error:  # noqa: BLE001 - raised once the sender knows
            errors.append(error)
            return None

    def copy(slot: Slot, raw: Tensor) -> int:
        return buffers.read_weight(slot.of(raw), target(slot.name))

    def start(message: _Message, slots: Sequence[Slot]) -> None:
        whole = attempt(target, slots[0].name) if len(slots) == 1 else None
        usable = whole is not None and whole.device.type == group.device.type and whole.numel()
        message.start(buffers.as_bytes(whole) if whole is not None and usable else message.buffer(slots))

    messages = _Message(group), _Message(group)
    for slots, message in zip(groups, messages, strict=False):
        start(message, slots)
    received: list[tuple[str, int | None]] = []
    for number, slots in enumerate(groups):
        message = messages[number % 2]
        raw = message.finish()
        received += [(slot.name, attempt(copy, slot, raw)) for slot in slots]
        if number + 2 < len(groups):
            start(message, groups[number + 2])
    checksums = torch.zeros(len(received), dtype=torch.int64, device=group.device)
    group.broadcast(checksums, "receiving the checksums of the weights")
    for (name, here), sent in zip(received, checksums.tolist(), strict=True):
        if here is not None:
            attempt(verify, name, here, sent % _MODULUS)
    group.sum(torch.tensor([int(bool(errors))], device=group.device), "sending this receiver's verdict")
    if errors:
        raise errors[0]

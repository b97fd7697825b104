"""The engine's side of a refit: a mix-in that implements what `GenerationEngine` says of receiving.

It checks names, shapes, dtypes and checksums. An engine says where weights go (`refit_sink`), or gets them all at once
by its `load_weights`. Between the first weight of a refit and the last, and after one that failed, it must not
generate: `require_weights` says so.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from rlframework.errors import RefitError, RefitNotPrepared, UserError
from rlframework.interfaces.generation import GenerationEngine
from rlframework.weight_sync import collective
from rlframework.weight_sync.buffers import Info, Slot, layout_checksum, take
from rlframework.weight_sync.ipc import GroupHandles, Inbox, Room, device_id
from rlframework.weight_sync.process_group import RefitGroup
from rlframework.weight_sync.shared_memory import SharedMemory

_SHOWN = 8

_OFFERED = "offered"
"""In place of the name of a refit that the trainer has not sent anything of."""


class WeightSink(Protocol):
    """Where the weights of one refit go."""

    def room(self, name: str) -> Tensor:
        """A contiguous tensor of the weight's shape and dtype, to be filled before `finish`; for a name always one."""

    def memory(self) -> SharedMemory | None:
        """What each `room` lies in from now on, after the refit too, where other processes can write to it."""
        return None

    def finish(self) -> None:
        """All are there: use them from now on."""


class CollectingSink(WeightSink):
    """Keeps the weights, and gives them to `load_weights` together: a second copy of them for that time."""

    def __init__(self, info: Info, device: torch.device, load_weights: Any) -> None:
        self._info, self._device, self._load = info, device, load_weights
        self._weights: dict[str, Tensor] = {}

    def room(self, name: str) -> Tensor:
        """See `WeightSink.room`."""
        if name not in self._weights:
            shape, dtype = self._info[name]
            self._weights[name] = torch.empty(shape, dtype=dtype, device=self._device)
        return self._weights[name]

    def finish(self) -> None:
        """See `WeightSink.finish`."""
        weights, self._weights = self._weights, {}
        self._load(weights.items())


class Arrivals:
    """One refit at the receiver: what has come and what is missing."""

    def __init__(self, info: Info, sink: WeightSink) -> None:
        self._info, self._sink = info, sink
        self._left = dict.fromkeys(info)

    def room(self, slot: Slot) -> Tensor:
        """Bytes that a weight may be written to, to be held there."""
        self._check(slot)
        return self._sink.room(slot.name).detach().view(-1).view(torch.uint8)

    def hold(self, slot: Slot, raw: Tensor) -> int:
        """Let a weight in, if it is one that was told of; its checksum."""
        self._check(slot)
        return take(raw, self._sink.room(slot.name))

    def accept(self, name: str, arrived: int, sent: int) -> None:
        """Compare the checksums of a weight. The last one finishes the refit."""
        if arrived != sent:
            raise RefitError(
                f"{name} is not what the trainer sent: its checksum is {arrived:016x} here and was {sent:016x} there"
            )
        del self._left[name]
        if not self._left:
            self._sink.finish()

    def _check(self, slot: Slot) -> None:
        if slot.name not in self._info:
            raise UserError(
                f"{slot.name} came, which prepare_refit_info did not tell of; it told of {_some(self._info)}"
            )
        if slot.name not in self._left:
            raise RefitError(f"{slot.name} came twice in one refit")
        shape, dtype = self._info[slot.name]
        if (slot.shape, slot.dtype) != (tuple(shape), dtype):
            raise RefitError(
                f"{slot.name} came with shape {slot.shape} in {slot.dtype}; prepare_refit_info told of "
                f"{tuple(shape)} in {dtype}"
            )

    def offer(self) -> tuple[Room, SharedMemory] | None:
        """Where the sink has room for the weights, if others can write to it."""
        memory = self._sink.memory()
        if memory is None:
            return None
        offsets = {name: memory.offset(self._sink.room(name)) for name in self._info}
        return Room(memory.handle, layout_checksum(self._info), offsets), memory

    @property
    def missing(self) -> list[str]:
        """Names that have not come."""
        return list(self._left)


class ReceivesWeights(GenerationEngine, ABC):
    """The receiving side, for any engine. It calls `require_weights` before it generates."""

    refit_device: torch.device
    refit_deadline: float
    """Of the engine: where its weights lie, and `generation.refit.deadline`."""

    _refit_info: Info | None = None
    _refit_now: tuple[str, Arrivals] | None = None
    _refit_failed = ""
    _refit_inbox: Inbox | None = None
    _refit_group: RefitGroup | None = None

    def refit_sink(self, info: Info) -> WeightSink:
        """Where the weights `info` go. What the engine generated with so far may be given up from here on."""
        return CollectingSink(info, self.refit_device, self.load_weights)

    def require_weights(self) -> None:
        """A `UserError` while a refit has not come to its end, or has failed."""
        if self._refit_now is not None:
            missing = self._refit_now[1].missing
            raise UserError(
                f"the refit of this engine is not complete, and it does not generate with half of the new weights: "
                f"{len(missing)} are missing: {_some(missing)}"
            )
        if self._refit_failed:
            raise UserError(f"the last refit of this engine failed ({self._refit_failed}); refit it again first")

    def get_refit_device(self) -> str:
        """The device that IPC must reach, as `device_id` names it."""
        return device_id(self.refit_device)

    @property
    def has_joined(self) -> bool:
        """Whether there is a process group for collective refits."""
        return self._refit_group is not None

    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> None:
        """See `GenerationEngine.prepare_refit_info`."""
        if not state_dict_info:
            raise UserError("prepare_refit_info was given no weights")
        self._refit_info = {name: (tuple(shape), dtype) for name, (shape, dtype) in state_dict_info.items()}
        self._refit_now = None

    def offer_refit_memory(self) -> dict[str, Any]:
        """See `GenerationEngine.offer_refit_memory`: of the sink's memory, on a CPU."""
        if self.refit_device.type != "cpu":
            return {}
        arrivals = self._begin(_OFFERED)
        self._refit_inbox = self._refit_inbox or Inbox()
        room, self._refit_inbox.own = arrivals.offer() or (None, None)
        return {} if room is None else {self.get_refit_device(): room}

    def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, Any]) -> bool:
        """See `GenerationEngine.update_weights_from_ipc_handles`."""
        mine = self.get_refit_device()
        if mine not in ipc_handles:
            raise UserError(
                f"the trainer shares weights on {sorted(ipc_handles)}, and this engine is on {mine!r}; "
                "set generation.refit.transport to collective"
            )
        handles: GroupHandles = ipc_handles[mine]
        if self._refit_now is not None and self._refit_now[0] == _OFFERED:
            self._refit_now = handles.refit, self._refit_now[1]
        if self._refit_now is None or self._refit_now[0] != handles.refit:
            self._begin(handles.refit)
        self._refit_inbox = self._refit_inbox or Inbox()
        try:
            raw = self._refit_inbox.open(handles, self.refit_device)
            for slot, checksum in zip(handles.slots, handles.checksums, strict=True):
                if self._refit_now is None:
                    raise RefitError(f"{slot.name} came after all weights of the refit")
                arrivals = self._refit_now[1]
                arrivals.accept(slot.name, arrivals.hold(slot, slot.of(raw)), checksum)
                self._end(arrivals)
        except Exception as error:
            self._fail(error)
            raise
        return True

    def init_collective(self, ip: str, port: int, world_size: int, rank: int = 1) -> None:
        """See `GenerationEngine.init_collective`."""
        if self._refit_group is not None:
            self._refit_group.close()
        self._refit_group = RefitGroup(ip, port, rank, world_size, self.refit_device, self.refit_deadline)

    def update_weights_from_collective(self) -> bool:
        """See `GenerationEngine.update_weights_from_collective`."""
        if self._refit_group is None:
            raise RefitNotPrepared("init_collective must be called before update_weights_from_collective")
        arrivals = self._begin("collective")
        assert self._refit_info is not None
        try:
            collective.receive(self._refit_group, self._refit_info, arrivals)
            self._end(arrivals)
        except Exception as error:
            self._fail(error)
            if self._refit_group.closed:
                self._refit_group = None
            raise
        return True

    def _begin(self, refit: str) -> Arrivals:
        if self._refit_info is None:
            raise RefitNotPrepared("prepare_refit_info must be called before weights are sent: names, shapes, dtypes")
        self._refit_failed = ""
        arrivals = Arrivals(self._refit_info, self.refit_sink(self._refit_info))
        self._refit_now = refit, arrivals
        return arrivals

    def _end(self, arrivals: Arrivals) -> None:
        if not arrivals.missing:
            self._refit_now = None

    def _fail(self, error: Exception) -> None:
        self._refit_now, self._refit_failed = None, str(error)


def _some(names: Any) -> str:
    """The first of `names`."""
    listed = list(names)
    return ", ".join(listed[:_SHOWN]) + (f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")

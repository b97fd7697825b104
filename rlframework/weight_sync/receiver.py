"""The engine's side of a refit: a mix-in that implements the receiving methods of `GenerationEngine`.

It checks names, shapes, dtypes and checksums. An engine either names the target of each weight (`refit_sink`) or gets
all weights at once through `load_weights`. From the first weight of a refit to the last, and after a failed refit,
`require_weights` raises, so the engine does not generate.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor

from rlframework.errors import RefitError, RefitNotPrepared, UserError
from rlframework.interfaces.generation import GenerationEngine
from rlframework.weight_sync import collective
from rlframework.weight_sync.buffers import Slot, WeightInfo, layout_checksum, read_weight
from rlframework.weight_sync.ipc import GroupHandles, IpcReceiver, ReceiveBuffer, device_id
from rlframework.weight_sync.process_group import RefitGroup
from rlframework.weight_sync.shared_memory import SharedMemory

_MAX_LISTED = 8
"""Names listed in an error message."""

_LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], object]

_OFFERED = "offered"
"""Placeholder id of a refit whose memory was offered before the trainer sent its first group."""


class WeightSink(Protocol):
    """The destination of the weights of one refit."""

    def target(self, name: str) -> Tensor:
        """Return the contiguous tensor to fill before `finish`, of the weight's shape and dtype; always the same."""

    def memory(self) -> SharedMemory | None:
        """Return the shared memory that stores all targets, even after the refit; None if they are not shared."""
        return None

    def finish(self) -> None:
        """Start using the weights; called once all targets are filled."""


class CollectingSink(WeightSink):
    """Collects the weights for one call of `load_weights`; needs a second copy of them until then."""

    def __init__(self, info: WeightInfo, device: torch.device, load_weights: _LoadWeights) -> None:
        self._info, self._device, self._load = info, device, load_weights
        self._weights: dict[str, Tensor] = {}

    def target(self, name: str) -> Tensor:
        """See `WeightSink.target`."""
        if name not in self._weights:
            shape, dtype = self._info[name]
            self._weights[name] = torch.empty(shape, dtype=dtype, device=self._device)
        return self._weights[name]

    def finish(self) -> None:
        """See `WeightSink.finish`."""
        weights, self._weights = self._weights, {}
        self._load(weights.items())


class EngineState(TypedDict):
    """The state of an engine that the driver needs before a refit.

    `device`: its id, as `device_id` defines it, or "" if unknown; `joined`: whether it has a process group.
    """

    device: str
    joined: bool


class IncomingRefit:
    """The refit `refit` in progress at the receiver: checks what arrives; `missing`: the names still to come."""

    def __init__(self, refit: str, info: WeightInfo, sink: WeightSink) -> None:
        self.refit, self._info, self.sink = refit, info, sink
        self.missing = dict.fromkeys(info)

    def target(self, slot: Slot) -> Tensor:
        """Return the bytes that the weight may be received into, 1-D uint8."""
        self._check(slot)
        return self.sink.target(slot.name).detach().view(-1).view(torch.uint8)

    def receive(self, slot: Slot, raw: Tensor) -> int:
        """Copy an announced weight from `raw` to its target; return its checksum."""
        self._check(slot)
        return read_weight(raw, self.sink.target(slot.name))

    def verify(self, name: str, received: int, sent: int) -> None:
        """Compare the checksums of a weight. Verifying the last weight finishes the refit."""
        if received != sent:
            raise RefitError(
                f"received weight {name!r} differs from what the trainer sent: its checksum is {received:016x}, "
                f"the trainer's is {sent:016x}"
            )
        del self.missing[name]
        if not self.missing:
            self.sink.finish()

    def _check(self, slot: Slot) -> None:
        if slot.name not in self._info:
            raise UserError(
                f"received weight {slot.name!r}, which was not announced by prepare_refit_info "
                f"(announced: {_listed(self._info)})"
            )
        if slot.name not in self.missing:
            raise RefitError(f"received weight {slot.name!r} twice in one refit")
        shape, dtype = self._info[slot.name]
        if (slot.shape, slot.dtype) != (tuple(shape), dtype):
            raise RefitError(
                f"received weight {slot.name!r} with shape {slot.shape} in {slot.dtype}; prepare_refit_info announced "
                f"{tuple(shape)} in {dtype}"
            )

    def receive_buffer(self, memory: SharedMemory) -> ReceiveBuffer:
        """Return `memory`, the sink's, as a receive buffer."""
        offsets = {name: memory.offset(self.sink.target(name)) for name in self._info}
        return ReceiveBuffer(memory.handle, layout_checksum(self._info), offsets)


class ReceivesWeights(GenerationEngine, ABC):
    """The receiving side of refits, for any engine. The engine must call `require_weights` before it generates."""

    refit_device: torch.device
    """The device of the engine's weights; set by the engine."""
    refit_deadline: float
    """`generation.refit.deadline` in seconds; set by the engine."""

    _refit_info: WeightInfo | None = None
    _refit_now: IncomingRefit | None = None
    _refit_failed = ""
    _refit_group: RefitGroup | None = None

    def refit_sink(self, info: WeightInfo) -> WeightSink:
        """Return the destination of the weights `info`. The engine may drop its current weights from here on."""
        return CollectingSink(info, self.refit_device, self.load_weights)

    def require_weights(self) -> None:
        """Raise `UserError` while a refit is incomplete, and after one that failed."""
        if self._refit_now is not None:
            missing = self._refit_now.missing
            raise UserError(
                f"cannot generate during a refit: {len(missing)} of the new weights are missing ({_listed(missing)}); "
                "complete the refit first"
            )
        if self._refit_failed:
            raise UserError(
                f"the last refit of this engine failed ({self._refit_failed}); refit it again before generating"
            )

    def get_refit_state(self) -> EngineState:
        """Return the state that the driver needs before a refit."""
        return {"device": device_id(self.refit_device), "joined": self._refit_group is not None}

    @cached_property
    def _refit_receiver(self) -> IpcReceiver:
        return IpcReceiver()

    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> None:
        """See `GenerationEngine.prepare_refit_info`."""
        if not state_dict_info:
            raise UserError("prepare_refit_info was given no weights; give the name, shape and dtype of each")
        self._refit_info = {name: (tuple(shape), dtype) for name, (shape, dtype) in state_dict_info.items()}
        self._refit_now = None

    def offer_refit_memory(self) -> dict[str, ReceiveBuffer]:
        """See `GenerationEngine.offer_refit_memory`; offers the sink's memory on a CPU, nothing on a GPU."""
        if self.refit_device.type != "cpu":
            return {}
        incoming = self._begin(_OFFERED)
        self._refit_receiver.offered = memory = incoming.sink.memory()
        return {} if memory is None else {device_id(self.refit_device): incoming.receive_buffer(memory)}

    def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, GroupHandles]) -> bool:
        """See `GenerationEngine.update_weights_from_ipc_handles`."""
        device = device_id(self.refit_device)
        if device not in ipc_handles:
            raise UserError(
                f"the trainer shares weights on {sorted(ipc_handles)}, but this engine is on {device!r}; "
                "set generation.refit.transport to collective"
            )
        handles = ipc_handles[device]
        if self._refit_now is not None and self._refit_now.refit == _OFFERED:
            self._refit_now.refit = handles.refit
        if self._refit_now is None or self._refit_now.refit != handles.refit:
            self._begin(handles.refit)
        try:
            raw = self._refit_receiver.open(handles, self.refit_device)
            for slot, checksum in zip(handles.slots, handles.checksums, strict=True):
                if self._refit_now is None:
                    raise RefitError(f"received weight {slot.name!r} after the refit was complete")
                incoming = self._refit_now
                incoming.verify(slot.name, incoming.receive(slot, slot.of(raw)), checksum)
                if not incoming.missing:
                    self._refit_now = None
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
        incoming = self._begin("collective")
        assert self._refit_info is not None
        try:
            collective.receive(self._refit_group, self._refit_info, incoming)
            self._refit_now = None
        except Exception as error:
            self._fail(error)
            if self._refit_group.closed:
                self._refit_group = None
            raise
        return True

    def _begin(self, refit: str) -> IncomingRefit:
        if self._refit_info is None:
            raise RefitNotPrepared(
                "prepare_refit_info must be called before weights are sent, with their names, shapes and dtypes"
            )
        self._refit_failed = ""
        self._refit_now = IncomingRefit(refit, self._refit_info, self.refit_sink(self._refit_info))
        return self._refit_now

    def _fail(self, error: Exception) -> None:
        self._refit_now, self._refit_failed = None, str(error)


def _listed(names: Iterable[str]) -> str:
    """List the first of `names`, and count the rest."""
    listed = list(names)
    more = f" and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
    return ", ".join(listed[:_MAX_LISTED]) + more

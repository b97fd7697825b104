"""The engine's side of a refit: a mix-in that implements the receiving methods of `GenerationEngine`.

It checks names, shapes, dtypes and checksums. An engine either names the target of each weight (`refit_sink`) or gets
all weights at once through `load_weights`.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor

from rlframework.errors import RefitError, RefitNotPrepared, UserError
from rlframework.interfaces.generation import GenerationEngine
from rlframework.weight_sync import collective, ipc
from rlframework.weight_sync.buffers import Slot, WeightInfo, layout_checksum, read_weight
from rlframework.weight_sync.collective import RefitGroup

_MAX_LISTED = 8  # names listed in an error message
_opened = lru_cache(ipc.BUFFERS)(ipc.open_memory)


class WeightSink(Protocol):
    """The destination of the weights of one refit."""

    def target(self, name: str) -> Tensor:
        """Return the contiguous tensor to fill before `finish`, of the weight's shape and dtype; always the same."""

    def memory(self) -> ipc.SharedMemory | None:
        """Return the shared memory that stores all targets, even after the refit; None if they are not shared."""
        return None

    def finish(self) -> None:
        """Start using the weights; called once all targets are filled."""


class CollectingSink(WeightSink):
    """Collects the weights for one call of `load_weights`; needs a second copy of them until then."""

    def __init__(
        self, info: WeightInfo, device: torch.device, load: Callable[[Iterable[tuple[str, Tensor]]], object]
    ) -> None:
        self._info, self._device, self._load = info, device, load
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
    """The state of an engine that the driver needs before a refit."""

    device: str  # its `device_id`, "" if unknown
    joined: bool  # whether it has a process group


class IncomingRefit:
    """The refit in progress at the receiver: checks what arrives. `missing`: the names still to come."""

    refit = ""
    """The id of a refit through handles; "" before its first group."""

    def __init__(self, info: WeightInfo, sink: WeightSink) -> None:
        self.info, self.sink, self.missing = info, sink, dict.fromkeys(info)

    def receive(self, slot: Slot, raw: Tensor, sent: int) -> None:
        """Copy a weight from the buffer `raw` to its target; `sent`: the trainer's checksum."""
        if slot.name not in self.info:
            raise UserError(
                f"received weight {slot.name!r}, which was not announced by prepare_refit_info "
                f"(announced: {listed(self.info)})"
            )
        if slot.name not in self.missing:
            raise RefitError(f"received weight {slot.name!r} twice in one refit")
        shape, dtype = self.info[slot.name]
        if (slot.shape, slot.dtype) != (tuple(shape), dtype):
            raise RefitError(
                f"received weight {slot.name!r} with shape {slot.shape} in {slot.dtype}; prepare_refit_info announced "
                f"{tuple(shape)} in {dtype}"
            )
        self.verify(slot.name, read_weight(slot.of(raw), self.sink.target(slot.name)), sent)

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
    _refit_offered: ipc.SharedMemory | None = None  # as a receive buffer

    def refit_sink(self, info: WeightInfo) -> WeightSink:
        """Return the destination of the weights `info`. The engine may drop its current weights from here on."""
        return CollectingSink(info, self.refit_device, self.load_weights)

    def require_weights(self) -> None:
        """Raise `UserError` from the first weight of a refit to the last, and after a refit that failed."""
        if self._refit_now is not None:
            missing = self._refit_now.missing
            raise UserError(
                f"cannot generate during a refit: {len(missing)} of the new weights are missing ({listed(missing)}); "
                "complete the refit first"
            )
        if self._refit_failed:
            raise UserError(
                f"the last refit of this engine failed ({self._refit_failed}); refit it again before generating"
            )

    def get_refit_state(self) -> EngineState:
        """Return what the driver needs before a refit."""
        return {"device": ipc.device_id(self.refit_device), "joined": self._refit_group is not None}

    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> None:
        """See `GenerationEngine.prepare_refit_info`."""
        if not state_dict_info:
            raise UserError("prepare_refit_info was given no weights; give the name, shape and dtype of each")
        self._refit_info = {name: (tuple(shape), dtype) for name, (shape, dtype) in state_dict_info.items()}
        self._refit_now = None

    def offer_refit_memory(self) -> dict[str, ipc.ReceiveBuffer]:
        """See `GenerationEngine.offer_refit_memory`; offers the sink's memory on a CPU, nothing on a GPU."""
        if self.refit_device.type != "cpu":
            return {}
        incoming = self._begin()
        self._refit_offered = memory = incoming.sink.memory()
        if memory is None:
            return {}
        offsets = {name: memory.offset(incoming.sink.target(name)) for name in incoming.info}
        return {
            ipc.device_id(self.refit_device): ipc.ReceiveBuffer(memory.handle, layout_checksum(incoming.info), offsets)
        }

    def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, ipc.GroupHandles]) -> bool:
        """See `GenerationEngine.update_weights_from_ipc_handles`."""
        device = ipc.device_id(self.refit_device)
        if device not in ipc_handles:
            raise UserError(
                f"the trainer shares weights on {sorted(ipc_handles)}, but this engine is on {device!r}; "
                "set generation.refit.transport to collective"
            )
        handles, incoming = ipc_handles[device], self._refit_now
        if incoming is None or incoming.refit not in ("", handles.refit):
            incoming = self._begin()
        incoming.refit = handles.refit
        with self._receiving(incoming):
            raw = self._open_memory(handles.memory)
            for slot, checksum in zip(handles.slots, handles.checksums, strict=True):
                incoming.receive(slot, raw, checksum)
        return True

    def _open_memory(self, handle: ipc.MemoryHandle | ipc.CudaHandle) -> Tensor:
        """Return the memory of a group of weights, 1-D uint8."""
        if isinstance(handle, ipc.CudaHandle):
            return handle.open(self.refit_device)
        offered = self._refit_offered
        return offered.raw if offered is not None and offered.handle == handle else _opened(handle)

    def init_collective(self, ip: str, port: int, world_size: int, rank: int = 1) -> None:
        """See `GenerationEngine.init_collective`."""
        if self._refit_group is not None:
            self._refit_group.close()
        self._refit_group = RefitGroup(ip, port, rank, world_size, self.refit_device, self.refit_deadline)

    def update_weights_from_collective(self) -> bool:
        """See `GenerationEngine.update_weights_from_collective`."""
        if self._refit_group is None:
            raise RefitNotPrepared("init_collective must be called before update_weights_from_collective")
        incoming = self._begin()
        try:
            with self._receiving(incoming):
                collective.receive(self._refit_group, incoming.info, incoming.sink.target, incoming.verify)
        finally:
            if self._refit_group.closed:
                self._refit_group = None
        return True

    def _begin(self) -> IncomingRefit:
        if self._refit_info is None:
            raise RefitNotPrepared(
                "prepare_refit_info must be called before weights are sent, with their names, shapes and dtypes"
            )
        self._refit_failed = ""
        self._refit_now = IncomingRefit(self._refit_info, self.refit_sink(self._refit_info))
        return self._refit_now

    @contextmanager
    def _receiving(self, incoming: IncomingRefit) -> Iterator[None]:
        """End the refit once all weights have arrived, or with an error."""
        try:
            yield
        except Exception as error:
            self._refit_now, self._refit_failed = None, str(error)
            raise
        if not incoming.missing:
            self._refit_now = None


def listed(names: Iterable[str]) -> str:
    """List the first of `names`, and count the rest."""
    first, rest = list(names)[:_MAX_LISTED], list(names)[_MAX_LISTED:]
    return ", ".join(first) + (f" and {len(rest)} more" if rest else "")

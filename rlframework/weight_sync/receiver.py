"""The engine's side of a refit: a mix-in that implements the receiving methods of `GenerationEngine`.

It checks versions, names, shapes, dtypes and checksums. An engine either names the target of each weight
(`refit_sink`) or gets all weights at once (`use_weights`).
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypedDict

import torch
from torch import Tensor

from rlframework.base.errors import EngineNotReady, RefitError, RefitNotPrepared, UserError
from rlframework.interfaces.generation import GenerationEngine, WeightReport
from rlframework.weight_sync import collective, ipc
from rlframework.weight_sync.buffers import Slot, WeightInfo, as_bytes, checksum, layout_checksum, read_weight

_MAX_LISTED = 8  # names listed in an error message

Held = Mapping[str, Tensor]
"""The engine's own tensors, by the names of the weights, of which checksums are reported."""


class WeightSink(Protocol):
    """The destination of the weights of one update."""

    def target(self, name: str) -> Tensor:
        """Return the contiguous tensor to fill before `finish`, of the weight's shape and dtype; always the same."""

    @torch.no_grad()
    def copy(self, name: str, weight: Tensor) -> None:
        """Copy a weight of this process to its target."""
        self.target(name).copy_(weight)

    def memory(self) -> ipc.SharedMemory | None:
        """Return the shared memory that stores all targets, even after the update; None if they are not shared."""
        return None

    def finish(self) -> Held | None:
        """Start using the weights; called once all targets are filled.

        Returns the tensors that the engine now uses, by the names of the weights, for their checksums; those in another
        shape or dtype are ignored.
        """


class CollectingSink(WeightSink):
    """Collects the weights for one call of `load`; needs a second copy of them until then."""

    def __init__(
        self,
        info: WeightInfo,
        device: torch.device,
        load: Callable[[Iterable[tuple[str, Tensor]]], Held | None],
    ) -> None:
        self._info, self._device, self._load = info, device, load
        self._weights: dict[str, Tensor] = {}

    def target(self, name: str) -> Tensor:
        """See `WeightSink.target`."""
        if name not in self._weights:
            shape, dtype = self._info[name]
            self._weights[name] = torch.empty(shape, dtype=dtype, device=self._device)
        return self._weights[name]

    def finish(self) -> Held | None:
        """See `WeightSink.finish`."""
        weights, self._weights = self._weights, {}
        return self._load(weights.items())


class EngineState(TypedDict):
    """The state of an engine that the driver needs before a refit."""

    device: str  # its `device_id`, "" if unknown
    joined: bool  # whether it has a process group


class WeightUpdate:
    """The update in progress at the receiver: checks what arrives. `missing`: the names still to come."""

    transfer = ""
    """The id of a transfer through handles; "" before its first group."""

    def __init__(self, version: int, info: WeightInfo, sink: WeightSink, device: torch.device) -> None:
        """`device`: that of the transport, which decides how checksums are computed."""
        self.version, self.info, self.sink, self.missing = version, info, sink, dict.fromkeys(info)
        self._device = device
        self._sums: dict[str, int] = {}  # of the targets, computed while they were in a cache

    def receive(self, slot: Slot, raw: Tensor, sent: int) -> None:
        """Copy a weight from the buffer `raw` to its target; `sent`: the trainer's checksum."""
        self._expect(slot.name, slot.shape, slot.dtype)
        self.verify(slot.name, read_weight(slot.of(raw), self.sink.target(slot.name)), sent)

    def copy(self, name: str, weight: Tensor) -> None:
        """Copy a weight of this process to its target."""
        self._expect(name, weight.shape, weight.dtype)
        self.sink.copy(name, weight)
        del self.missing[name]

    def _expect(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raise `RefitError` unless a weight was announced like this, and is missing."""
        if name not in self.info:
            raise RefitError(
                f"received weight {name!r}, which was not announced by begin_weight_update "
                f"(announced: {listed(self.info)})"
            )
        if name not in self.missing:
            raise RefitError(f"received weight {name!r} twice in one refit")
        if (tuple(shape), dtype) != self.info[name]:
            raise RefitError(
                f"received weight {name!r} with shape {tuple(shape)} in {dtype}; begin_weight_update announced "
                f"{self.info[name][0]} in {self.info[name][1]}"
            )

    def verify(self, name: str, received: int, sent: int) -> None:
        """Compare the checksums of a weight that arrived."""
        if received != sent:
            raise RefitError(
                f"received weight {name!r} differs from what the trainer sent: its checksum is {received:016x}, "
                f"the trainer's is {sent:016x}"
            )
        self._sums[name] = received
        del self.missing[name]

    def finish(self) -> dict[str, int]:
        """Use the weights, and return the checksums of those that are held as sent; none of weights of this process."""
        if self.missing:
            raise RefitError(
                f"{len(self.missing)} of the {len(self.info)} weights of version {self.version} have not arrived "
                f"({listed(self.missing)})"
            )
        filled = {self.sink.target(name).data_ptr(): name for name in self._sums}
        held = self.sink.finish() or {}
        return {
            name: self._checksum(name, tensor, filled) for name, tensor in held.items() if self._as_sent(name, tensor)
        }

    def _as_sent(self, name: str, tensor: Tensor) -> bool:
        """Whether a weight with this name, shape and dtype came from the trainer, on this type of device."""
        same = name in self._sums and (tuple(tensor.shape), tensor.dtype) == self.info[name]
        return same and tensor.device.type == self._device.type

    def _checksum(self, name: str, tensor: Tensor, filled: Mapping[int, str]) -> int:
        """Return the checksum of a tensor in use, which is not read again if it is the target of this weight."""
        if filled.get(tensor.data_ptr()) == name and tensor.is_contiguous():
            return self._sums[name]
        return checksum(as_bytes(tensor.contiguous()))


class WeightState:
    """The weights of an engine: none yet, those of a version, those of an update in progress, or of one that failed."""

    def __init__(self) -> None:
        self._version: int | None = None  # of the latest update, in progress or not
        self._not_ready = "it has no weights yet: give it weights with attach, or with a weight update"

    def begin(self, version: int) -> None:
        """Begin an update, until `commit` or `fail`. Raises `RefitError` for a version before the latest one."""
        if self._version is not None and version < self._version:
            raise RefitError(
                f"the weights of version {version} are older than those of version {self._version}, which the engine "
                "was given before; send the latest weights"
            )
        self._version = version
        self._not_ready = f"its update to version {version} is not finished: call finish_weight_update first"

    def commit(self, version: int) -> None:
        """Use the weights of `version` from now on."""
        self._version, self._not_ready = version, ""

    def fail(self, reason: str) -> None:
        """End the update; there are no usable weights until the next one."""
        self._not_ready = f"its last update, to version {self._version}, failed ({reason}): refit it again"

    def require(self) -> int:
        """Return the version of the weights in use; raise `EngineNotReady` if there are none."""
        if self._not_ready or self._version is None:
            raise EngineNotReady(f"the generation engine cannot serve requests: {self._not_ready}")
        return self._version


class ReceivesWeights(GenerationEngine, ABC):
    """The receiving side of refits, for any engine.

    The engine must call `weight_state.require` before it serves requests, which returns their version, and
    `weight_state.commit` when a module is attached. A subclass sets `refit_device` and `refit_deadline`, and implements
    `refit_sink` or `use_weights`.
    """

    refit_device: torch.device
    """The device of the engine's weights; set by the engine."""
    refit_deadline: float
    """`generation.refit.deadline` in seconds; set by the engine."""

    _update: WeightUpdate | None = None
    _refit_group: collective.RefitGroup | None = None
    _refit_offered: ipc.SharedMemory | None = None  # as a receive buffer
    _weight_state: WeightState | None = None

    @property
    def weight_state(self) -> WeightState:
        """Whether there are weights to serve with, and their version."""
        self._weight_state = self._weight_state or WeightState()
        return self._weight_state

    # -- implemented by the engine -------------------------------------------------------------------------------------

    def refit_sink(self, info: WeightInfo) -> WeightSink:
        """Return the destination of the weights `info`. The engine may drop its current weights from here on."""
        return CollectingSink(info, self.refit_device, self.use_weights)

    def use_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Held | None:
        """Use `weights`, all those of an update, from now on; the result is that of `WeightSink.finish`."""
        raise NotImplementedError(f"{type(self).__name__} must implement use_weights or refit_sink")

    def drop_caches(self) -> int:
        """Drop what was computed with earlier weights; return the number of cached tokens that were dropped."""
        return 0

    # -- phases of an update -------------------------------------------------------------------------------------------

    def begin_weight_update(self, version: int, specs: WeightInfo) -> None:
        """See `GenerationEngine.begin_weight_update`."""
        if not specs:
            raise RefitError("begin_weight_update was given no weights; give the name, shape and dtype of each")
        self.weight_state.begin(version)
        info = {name: (tuple(shape), dtype) for name, (shape, dtype) in specs.items()}
        self._update = None
        with self._failing():
            self._update = WeightUpdate(version, info, self.refit_sink(info), self.refit_device)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `GenerationEngine.load_weights`. Exhausts `weights` in any case: reading it may be a collective."""
        stream = iter(weights)
        try:
            with self._receiving() as update:
                for name, weight in stream:
                    update.copy(name, weight)
        finally:
            for _ in stream:
                pass

    def finish_weight_update(self) -> WeightReport:
        """See `GenerationEngine.finish_weight_update`."""
        with self._receiving() as update:
            checksums = update.finish()
            dropped = self.drop_caches()
        self._update = None
        self.weight_state.commit(update.version)
        return WeightReport(update.version, checksums, dropped)

    @contextmanager
    def _receiving(self) -> Iterator[WeightUpdate]:
        """Yield the update in progress; an error in the block ends it."""
        if self._update is None:
            raise RefitNotPrepared(
                "begin_weight_update must be called before weights are sent, and again after an update that failed"
            )
        with self._failing():
            yield self._update

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """End the update at an error in the block, and raise mistakes in weights as `RefitError`."""
        try:
            yield
        except Exception as error:
            self._update = None
            self.weight_state.fail(str(error))
            if isinstance(error, UserError):
                raise RefitError(str(error)) from error
            raise

    # -- transports ----------------------------------------------------------------------------------------------------

    def get_refit_state(self) -> EngineState:
        """Return what the driver needs before a refit."""
        return {"device": ipc.device_id(self.refit_device), "joined": self._refit_group is not None}

    def offer_refit_memory(self) -> dict[str, ipc.ReceiveBuffer]:
        """See `GenerationEngine.offer_refit_memory`; offers the sink's memory on a CPU, nothing on a GPU."""
        if self.refit_device.type != "cpu":
            return {}
        with self._receiving() as update:
            self._refit_offered = memory = update.sink.memory()
            if memory is None:
                return {}
            offsets = {name: memory.offset(update.sink.target(name)) for name in update.info}
        device = ipc.device_id(self.refit_device)
        return {device: ipc.ReceiveBuffer(memory.handle, layout_checksum(update.info), offsets)}

    def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, ipc.GroupHandles]) -> bool:
        """See `GenerationEngine.update_weights_from_ipc_handles`."""
        device = ipc.device_id(self.refit_device)
        if device not in ipc_handles:
            raise UserError(
                f"the trainer shares weights on {sorted(ipc_handles)}, but this engine is on {device!r}; "
                "set generation.refit.transport to collective"
            )
        handles = ipc_handles[device]
        with self._receiving() as update:
            if update.transfer not in ("", handles.refit):
                raise RefitError("received weights of two transfers in one update: begin each with begin_weight_update")
            update.transfer = handles.refit
            raw = self._open_memory(handles.memory)
            for slot, sent in zip(handles.slots, handles.checksums, strict=True):
                update.receive(slot, raw, sent)
        return True

    def _open_memory(self, handle: ipc.MemoryHandle | ipc.CudaHandle) -> Tensor:
        """Return the memory of a group of weights, 1-D uint8."""
        if isinstance(handle, ipc.CudaHandle):
            return handle.open(self.refit_device)
        offered = self._refit_offered
        return offered.raw if offered is not None and offered.handle == handle else ipc.open_shared(handle)

    def init_collective(self, ip: str, port: int, world_size: int, rank: int = 1) -> None:
        """See `GenerationEngine.init_collective`."""
        if self._refit_group is not None:
            self._refit_group.close()
        self._refit_group = collective.RefitGroup(ip, port, rank, world_size, self.refit_device, self.refit_deadline)

    def update_weights_from_collective(self) -> bool:
        """See `GenerationEngine.update_weights_from_collective`."""
        if self._refit_group is None:
            raise RefitNotPrepared("init_collective must be called before update_weights_from_collective")
        try:
            with self._receiving() as update:
                collective.receive(self._refit_group, update.info, update.sink.target, update.verify)
        finally:
            if self._refit_group.closed:
                self._refit_group = None
        return True


def listed(names: Iterable[str]) -> str:
    """List the first of `names`, and count the rest."""
    first, rest = list(names)[:_MAX_LISTED], list(names)[_MAX_LISTED:]
    return ", ".join(first) + (f" and {len(rest)} more" if rest else "")

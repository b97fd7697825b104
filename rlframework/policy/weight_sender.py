"""The trainer's side of weight sync: sending a policy worker's weights by either transport.

`PolicyWorkerBase` derives from `Refitting`. All ranks gather the weights; one rank per machine (IPC on CPUs), one per
GPU (IPC on GPUs), or rank 0 (collective) sends them. A sender that fails keeps gathering to the end,
so that the other ranks return from the call too.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import GenerationConfig
from rlframework.errors import NotSupported, RefitError, RefitNotPrepared, UserError
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.engine import Engine
from rlframework.weight_sync import collective
from rlframework.weight_sync.buffers import WeightInfo, bytes_of
from rlframework.weight_sync.ipc import GroupHandles, IpcSender, device_id
from rlframework.weight_sync.memory_budget import free_bytes, group_bytes
from rlframework.weight_sync.process_group import RefitGroup
from rlframework.workers.ports import bind_free_port


class Refitting(Engine, PolicyWorker, ABC):
    """Calls that send weights, on `weight_specs` and `gather_weights`."""

    transports: ClassVar[frozenset[str]] = frozenset({"ipc", "collective"})
    """The supported transports. One that a backend removes raises `NotSupported` and must not be declared on
    its record.
    """

    config: PolicyConfig
    context: WorkerContext
    device: torch.device
    _generation_config: GenerationConfig
    _weights_version: int
    _ipc_sender: IpcSender | None = None
    _refit_group: RefitGroup | None = None
    _refit_port: socket.socket | None = None
    _joined = False

    # -- what is sent -------------------------------------------------------------------------------------------------

    def _transfer_dtype(self) -> torch.dtype:
        """The dtype in which floating-point weights are sent; others keep theirs."""
        chosen = self._generation_config.refit.dtype
        dtype: torch.dtype = getattr(torch, self.config.precision if chosen == "auto" else chosen)
        return dtype

    def _transfer_info(self) -> WeightInfo:
        dtype = self._transfer_dtype()
        return {
            name: (spec.shape, dtype if spec.dtype.is_floating_point else spec.dtype)
            for name, spec in self.weight_specs().items()
        }

    @abstractmethod
    def _onload(self, *parts: str) -> dict[str, int]:
        """Onload those of `parts` ("model", "optimizer") that are offloaded."""

    def get_refit_state(self) -> dict[str, Any]:
        """Return the state that the driver needs before a refit.

        `version` of the weights, the `device` for IPC, and `joined`: whether `init_collective` was called and no
        failure has closed the group since.
        """
        joined = self._joined and (self.context.rank > 0 or self._refit_group is not None)
        return {"version": self._weights_version, "device": device_id(self.device), "joined": joined}

    def _weights_to_send(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors that `_transfer_info` describes, one at a time. Collective."""
        return self.gather_weights(names)

    @contextmanager
    def _gathering_weights(self, names: Iterable[str]) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Yield the weights; on exit, also after an exception, gather the remaining ones too."""
        self._onload("model")
        weights = iter(self._weights_to_send(names))
        try:
            yield weights
        finally:
            for _ in weights:
                pass

    # -- IPC ----------------------------------------------------------------------------------------------------------

    def prepare_weights_for_ipc(
        self, receive_buffers: Mapping[str, Any] | None = None
    ) -> tuple[list[tuple[str, int]], float]:
        """See `PolicyWorker.prepare_weights_for_ipc`."""
        self._require_transport("ipc")
        if self._ipc_sender is None:
            self._ipc_sender = IpcSender(self.device)
        self._ipc_sender.begin(self._transfer_info(), (receive_buffers or {}).get(device_id(self.device)))
        sizes = [(name, bytes_of(shape, dtype)) for name, (shape, dtype) in self._ipc_sender.info.items()]
        return sizes, free_bytes(self.device)

    def get_weights_ipc_handles(self, keys: Iterable[str]) -> dict[str, GroupHandles]:
        """See `PolicyWorker.get_weights_ipc_handles`."""
        self._require_transport("ipc")
        if self._ipc_sender is None or not self._ipc_sender.refit:
            raise RefitNotPrepared(
                "prepare_weights_for_ipc must be called before get_weights_ipc_handles, once per refit"
            )
        names = list(keys)
        if unknown := sorted(set(names) - set(self._ipc_sender.info)):
            raise UserError(f"unknown weights {unknown}; the names are those that prepare_weights_for_ipc returned")
        with self._gathering_weights(names) as weights:
            if self.device.type == "cpu" and self.context.local_rank:  # the machine's first rank shares them
                return {}
            return {device_id(self.device): self._ipc_sender.pack(names, weights)}

    # -- collective ---------------------------------------------------------------------------------------------------

    def reserve_refit_address(self) -> tuple[str, int]:
        """Return this machine's address and a port reserved for `init_collective`. For rank 0."""
        self._refit_port = bind_free_port(self.context.node or "127.0.0.1")
        address, port = self._refit_port.getsockname()[:2]
        return str(address), int(port)

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """See `PolicyWorker.init_collective`."""
        self._require_transport("collective")
        self._close_group()
        self._joined = True
        reserved, self._refit_port = self._refit_port, None
        if self.context.rank:
            return
        if reserved is not None and reserved.getsockname()[1] != port:
            reserved.close()
            reserved = None
        deadline = self._generation_config.refit.deadline
        self._refit_group = RefitGroup(ip, port, 0, world_size, self.device, deadline, reserved)

    def prepare_info_for_collective(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """See `PolicyWorker.prepare_info_for_collective`."""
        self._require_transport("collective")
        return dict(self._transfer_info())

    def broadcast_weights_for_collective(self) -> None:
        """See `PolicyWorker.broadcast_weights_for_collective`."""
        self._require_transport("collective")
        if not self._joined or (self.context.rank == 0 and self._refit_group is None):
            raise RefitNotPrepared(
                "init_collective must be called before broadcast_weights_for_collective, and again after a failure"
            )
        info = self._transfer_info()
        with self._gathering_weights(info) as weights:
            if self._refit_group is None:
                return
            try:
                budget = group_bytes(self._generation_config.refit.buffer_mb, self.device)
                collective.send(self._refit_group, info, weights, budget)
            except Exception:
                if self._refit_group.closed:
                    self._refit_group = None
                raise

    # -- both ---------------------------------------------------------------------------------------------------------

    def attempt(self, method: str, arguments: Mapping[str, Any]) -> tuple[Any, str]:
        """Call `method` and return its result and an empty string, or None and the message of a `RefitError`.

        An exception would stop the worker group. A failure of the receiver leaves the trainer intact, so its message
        is returned instead.
        """
        try:
            return getattr(self, method)(**arguments), ""
        except RefitError as error:
            return None, f"rank {self.context.rank} of the trainer: {error}"

    def finish_refit(self) -> None:
        """Release what is kept between refits: shared memory, and an engine's staging buffers."""
        if self._ipc_sender is not None:
            self._ipc_sender.close()

    def _close_group(self) -> None:
        group, self._refit_group = self._refit_group, None
        if group is not None:
            group.close()

    def _end_refit(self) -> None:
        """Release all resources."""
        self.finish_refit()
        self._close_group()
        if self._refit_port is not None:
            self._refit_port.close()
            self._refit_port = None

    def _require_transport(self, transport: str) -> None:
        if transport not in self.transports:
            raise NotSupported(
                f"{type(self).__name__} does not send weights over {transport}: its backend does not declare "
                f"{transport}_refit; choose a policy.backend that does: see `rlframework plugins`"
            )

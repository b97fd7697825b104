"""The trainer's side of a refit: what a policy worker sends, by either transport. `PolicyWorkerBase` derives from it.

All ranks gather; on each machine one of them (IPC, CPU), each GPU's (IPC, GPU), or rank 0 (collective) sends. Whatever
happens to the one that sends, it takes part in gathering to the end, so that the others leave the call too.
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
from rlframework.weight_sync.buffers import Info, bytes_of
from rlframework.weight_sync.ipc import GroupHandles, Outbox, device_id
from rlframework.weight_sync.memory_budget import free_bytes, group_bytes
from rlframework.weight_sync.process_group import RefitGroup
from rlframework.workers.ports import bind_free_port


class Refitting(Engine, PolicyWorker, ABC):
    """The calls that send weights, on `weight_specs` and `gather_weights`."""

    transports: ClassVar[frozenset[str]] = frozenset({"ipc", "collective"})
    """What a backend has of it; what it takes out here raises `NotSupported`, and is not declared on its record."""

    config: PolicyConfig
    context: WorkerContext
    device: torch.device
    _generation_config: GenerationConfig
    _weights_version: int
    _outbox: Outbox | None = None
    _refit_group: RefitGroup | None = None
    _refit_port: socket.socket | None = None
    _joined = False

    # -- what is sent -------------------------------------------------------------------------------------------------

    def _transfer_dtype(self) -> torch.dtype:
        """Of floating-point weights on their way; others stay as they are."""
        chosen = self._generation_config.refit.dtype
        dtype: torch.dtype = getattr(torch, self.config.precision if chosen == "auto" else chosen)
        return dtype

    def _transfer_info(self) -> Info:
        dtype = self._transfer_dtype()
        return {
            name: (spec.shape, dtype if spec.dtype.is_floating_point else spec.dtype)
            for name, spec in self.weight_specs().items()
        }

    @abstractmethod
    def _bring(self, *parts: str) -> dict[str, int]:
        """What of `parts` is away comes to the device."""

    def get_refit_state(self) -> dict[str, Any]:
        """What the driver asks before a refit: `version` of the weights, the `device` that IPC reaches, and whether
        `init_collective` was called, and not undone by a failure.
        """
        joined = self._joined and (self.context.rank > 0 or self._refit_group is not None)
        return {"version": self._weights_version, "device": device_id(self.device), "joined": joined}

    def _to_send(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """What `_transfer_info` tells of, whole, one at a time. Collective."""
        return self.gather_weights(names)

    @contextmanager
    def _gathered(self, names: Iterable[str]) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """The weights, which are gathered to the end on this rank too when the inside fails."""
        self._bring("model")
        weights = iter(self._to_send(names))
        try:
            yield weights
        finally:
            for _ in weights:
                pass

    # -- IPC ----------------------------------------------------------------------------------------------------------

    def prepare_weights_for_ipc(self, rooms: Mapping[str, Any] | None = None) -> tuple[list[tuple[str, int]], float]:
        """See `PolicyWorker.prepare_weights_for_ipc`."""
        self._require("ipc")
        if self._outbox is None:
            self._outbox = Outbox(self.device)
        self._outbox.begin(self._transfer_info(), (rooms or {}).get(device_id(self.device)))
        sizes = [(name, bytes_of(shape, dtype)) for name, (shape, dtype) in self._outbox.info.items()]
        return sizes, free_bytes(self.device)

    def get_weights_ipc_handles(self, keys: Iterable[str]) -> dict[str, GroupHandles]:
        """See `PolicyWorker.get_weights_ipc_handles`."""
        self._require("ipc")
        if self._outbox is None or not self._outbox.refit:
            raise RefitNotPrepared(
                "prepare_weights_for_ipc must be called before get_weights_ipc_handles, once a refit"
            )
        names = list(keys)
        if unknown := sorted(set(names) - set(self._outbox.info)):
            raise UserError(f"there are no weights {unknown}; prepare_weights_for_ipc names those that there are")
        with self._gathered(names) as weights:
            if self.device.type == "cpu" and self.context.local_rank:  # the first rank of the machine shares them
                return {}
            return {device_id(self.device): self._outbox.pack(names, weights)}

    # -- collective ---------------------------------------------------------------------------------------------------

    def reserve_refit_address(self) -> tuple[str, int]:
        """Address and port of this machine for `init_collective`, kept until that is called. For rank 0."""
        self._refit_port = bind_free_port(self.context.node or "127.0.0.1")
        address, port = self._refit_port.getsockname()[:2]
        return str(address), int(port)

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """See `PolicyWorker.init_collective`."""
        self._require("collective")
        self._close_group()
        self._joined = True
        kept, self._refit_port = self._refit_port, None
        if self.context.rank:
            return
        if kept is not None and kept.getsockname()[1] != port:
            kept.close()
            kept = None
        deadline = self._generation_config.refit.deadline
        self._refit_group = RefitGroup(ip, port, 0, world_size, self.device, deadline, kept)

    def prepare_info_for_collective(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """See `PolicyWorker.prepare_info_for_collective`."""
        self._require("collective")
        return dict(self._transfer_info())

    def broadcast_weights_for_collective(self) -> None:
        """See `PolicyWorker.broadcast_weights_for_collective`."""
        self._require("collective")
        if not self._joined or (self.context.rank == 0 and self._refit_group is None):
            raise RefitNotPrepared(
                "init_collective must be called before broadcast_weights_for_collective, and again after a failure"
            )
        info = self._transfer_info()
        with self._gathered(info) as weights:
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
        """What `method` returns, and an empty text; or None and what a `RefitError` in it says.

        An exception would end a group of workers in processes of their own; what goes wrong with a receiver leaves the
        trainer as it was.
        """
        try:
            return getattr(self, method)(**arguments), ""
        except RefitError as error:
            return None, f"rank {self.context.rank} of the trainer: {error}"

    def finish_refit(self) -> None:
        """Give back what is held between refits: the shared memory, and that of an engine."""
        if self._outbox is not None:
            self._outbox.close()

    def _close_group(self) -> None:
        group, self._refit_group = self._refit_group, None
        if group is not None:
            group.close()

    def _end_refit(self) -> None:
        """Let go of everything."""
        self.finish_refit()
        self._close_group()
        if self._refit_port is not None:
            self._refit_port.close()
            self._refit_port = None

    def _require(self, transport: str) -> None:
        if transport not in self.transports:
            raise NotSupported(
                f"{type(self).__name__} does not send weights by {transport}: its backend does not declare "
                f"{transport}_refit; choose a policy.backend that does: see `rlframework plugins`"
            )

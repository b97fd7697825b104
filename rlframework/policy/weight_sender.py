"""The trainer's side of weight sync: sending a policy worker's weights by either transport.

All ranks gather the weights; one rank per machine (IPC on CPUs), one per GPU (IPC on GPUs), or rank 0 (collective)
sends them. A sender that fails keeps gathering to the end, so that the other ranks return from the call too.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlframework.base.errors import NotSupported, RefitNotPrepared, UserError
from rlframework.config.sections import RefitConfig
from rlframework.interfaces.policy_worker import RefitState
from rlframework.policy.engine import Engine
from rlframework.policy.shared_state import Residency, TrainingProgress
from rlframework.policy.trained_weights import TrainedWeights
from rlframework.weight_sync import collective
from rlframework.weight_sync.buffers import WeightInfo, bytes_of
from rlframework.weight_sync.ipc import GroupHandles, IpcSender, device_id, free_bytes, group_bytes
from rlframework.workers.machine import bind_free_port
from rlframework.workers.process_groups import exhausting

_OF_CALL = 0.8  # of worker_group.deadlines.call, after which the driver ends the workers with an error that says less


@dataclass
class WeightSender:
    """Sends the weights of an engine to generation engines in other processes."""

    engine: Engine
    residency: Residency
    weights: TrainedWeights
    progress: TrainingProgress
    config: RefitConfig
    ipc: IpcSender | None = None
    _group: collective.RefitGroup | None = None
    _port: socket.socket | None = None
    _joined: bool = False
    _sent: dict[str, int] = field(default_factory=dict)  # checksums, by name

    def state(self) -> RefitState:
        """See `PolicyWorker.get_refit_state`."""
        self.residency.require_policy("a refit")
        joined = self._joined and (self.engine.context.rank > 0 or self._group is not None)
        return {"version": self.progress.weights_version, "device": device_id(self.engine.device), "joined": joined}

    def sent_checksums(self) -> dict[str, int]:
        """See `PolicyWorker.get_sent_checksums`."""
        return dict(self._sent)

    @contextmanager
    def _gathering_weights(self, names: Iterable[str]) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Yield the weights; on exit, also after an exception, gather the remaining ones too."""
        self.residency.require_policy("a refit")
        with self.residency.memory.during("refit"):
            self.residency.onload("model")
            weights = iter(self.weights.gather(names))
            with exhausting(weights):
                yield weights

    def prepare_ipc(
        self, receive_buffers: Mapping[str, Any] | None = None, devices: Collection[str] | None = None
    ) -> tuple[list[tuple[str, int]], float]:
        """See `PolicyWorker.prepare_weights_for_ipc`."""
        self._require_transport("ipc")
        device, self._sent = self.engine.device, {}
        self.ipc = self.ipc or IpcSender(device)
        self.ipc.begin(self.weights.transfer_info(), (receive_buffers or {}).get(device_id(device)), devices)
        sizes = [(name, bytes_of(shape, dtype)) for name, (shape, dtype) in self.ipc.info.items()]
        return sizes, free_bytes(device)

    def ipc_handles(self, keys: Iterable[str]) -> dict[str, GroupHandles]:
        """See `PolicyWorker.get_weights_ipc_handles`."""
        self._require_transport("ipc")
        if self.ipc is None or not self.ipc.refit:
            raise RefitNotPrepared(
                "prepare_weights_for_ipc must be called before get_weights_ipc_handles, once per refit"
            )
        names, device = list(keys), self.engine.device
        if unknown := sorted(set(names) - set(self.ipc.info)):
            raise UserError(f"unknown weights {unknown}; the names are those that prepare_weights_for_ipc returned")
        with self._gathering_weights(names) as weights:
            if device.type == "cpu" and self.engine.context.local_rank:  # the machine's first rank shares them
                return {}
            if not self.ipc.wanted:
                return {}
            handles = self.ipc.pack(names, weights)
            self._sent |= zip(names, handles.checksums, strict=True)
            return {device_id(device): handles}

    def reserve_address(self) -> tuple[str, int]:
        """See `PolicyWorker.reserve_refit_address`."""
        self._port = bind_free_port(self.engine.context.node or "127.0.0.1")
        address, port = self._port.getsockname()[:2]
        return str(address), int(port)

    def join(self, ip: str, port: int, world_size: int) -> None:
        """See `PolicyWorker.init_collective`."""
        self._require_transport("collective")
        self._close_group()
        self._joined = True
        reserved, self._port = self._port, None
        if self.engine.context.rank:
            return
        if reserved is not None and reserved.getsockname()[1] != port:
            reserved.close()
            reserved = None
        deadline = min(self.config.deadline, _OF_CALL * self.engine.context.deadline)
        self._group = collective.RefitGroup(ip, port, 0, world_size, self.engine.device, deadline, reserved)

    def collective_info(self) -> WeightInfo:
        """See `PolicyWorker.prepare_info_for_collective`."""
        self._require_transport("collective")
        return dict(self.weights.transfer_info())

    def broadcast(self) -> None:
        """See `PolicyWorker.broadcast_weights_for_collective`."""
        self._require_transport("collective")
        if not self._joined or (self.engine.context.rank == 0 and self._group is None):
            raise RefitNotPrepared(
                "init_collective must be called before broadcast_weights_for_collective, and again after a failure"
            )
        info, self._sent = self.weights.transfer_info(), {}
        with self._gathering_weights(info) as weights:
            if self._group is None:
                return
            try:
                budget = group_bytes(self.config.buffer_mb, self.engine.device)
                sums = collective.send(self._group, info, weights, budget)
                self._sent = dict(zip(info, sums, strict=True))
            except Exception:
                if self._group.closed:
                    self._group = None
                raise

    def release_gpu_buffers(self) -> None:
        """Free the buffers of a refit through CUDA IPC, for the engines on this GPU."""
        if self.ipc is not None and self.engine.device.type == "cuda":
            self.ipc.close()

    def close(self) -> None:
        """Release the shared memory, the process group and the port."""
        if self.ipc is not None:
            self.ipc.close()
        self._close_group()
        if self._port is not None:
            self._port.close()
            self._port = None

    def _close_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _require_transport(self, transport: str) -> None:
        if transport not in self.engine.transports:
            raise NotSupported(
                f"{type(self.engine).__name__} does not send weights over {transport}: its backend does not declare "
                f"{transport}_refit; choose a policy.backend that does: see `rlframework plugins`"
            )

"""Handles of GPU memory and the choice of processes that share it, as far as a machine without a GPU can show them."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframework.config.sections import RefitConfig
from rlframework.errors import ConfigError
from rlframework.weight_sync.coordinator import Refitter
from rlframework.weight_sync.ipc import CudaHandle, IpcSender, device_id

CPU = torch.device("cpu")
FIRST, SECOND = "GPU-1", "GPU-2"


def rebuild(*arguments: Any) -> Any:
    return arguments


class Workers:
    """A stand-in for a worker group whose workers are on `devices`; `calls` has the methods called."""

    def __init__(self, *devices: str) -> None:
        self.devices, self.sharding = devices, SimpleNamespace(size=len(devices))
        self.calls: dict[str, Any] = {}

    def run_all_workers_single_data(self, name: str, *, method: str, arguments: Any) -> Any:
        self.calls[method] = arguments
        return SimpleNamespace(method=method, devices=self.devices)

    def run_single_worker_single_data(self, name: str, worker: int, *, method: str, arguments: Any) -> Any:
        return SimpleNamespace(method=method, devices=self.devices[worker : worker + 1])

    def get_all_worker_results(self, future: Any) -> list[Any]:
        state = {"joined": False, "version": 1}
        results = {
            "get_refit_state": lambda device: {**state, "device": device},
            "prepare_info_for_collective": lambda _: {"a": ((2,), torch.float32)},
            "prepare_weights_for_ipc": lambda _: ([("a", 8)], 1e9),
            "get_weights_ipc_handles": lambda device: {device: "handle"},
            "offer_refit_memory": lambda _: {},
            "reserve_refit_address": lambda _: ("127.0.0.1", 1),
            "update_weights_from_ipc_handles": lambda _: True,
        }
        return [(results.get(future.method, lambda _: None)(device), "") for device in future.devices]


def refit(trainer: Workers, engines: Workers, transport: str) -> None:
    Refitter(trainer, engines, RefitConfig(), transport).refit()  # type: ignore[arg-type]


def test_memory_is_not_shared_within_its_own_process():
    memory = torch.zeros(4, dtype=torch.uint8)
    assert CudaHandle(memory).open(CPU) is memory


def test_a_handle_names_the_device_of_the_process_that_opens_it(monkeypatch):
    arguments = ("tensor", "size", "stride", "offset", "storage", "dtype", 3, "handle")
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", lambda _: (rebuild, arguments))
    arrived = pickle.loads(pickle.dumps(CudaHandle(torch.zeros(4, dtype=torch.uint8))))  # noqa: S301 - made here
    monkeypatch.undo()
    forwarded = pickle.loads(pickle.dumps(arrived))  # noqa: S301 - by the driver, which does not open it
    assert forwarded.open(torch.device("cuda", 5)) == (*arguments[:6], 5, "handle")


def test_only_devices_with_an_engine_share_memory():
    sender, info = IpcSender(CPU), {"a": ((2,), torch.float32)}
    for devices, wanted in ((None, True), ([device_id(CPU)], True), (["GPU-1"], False)):
        sender.begin(info, devices=devices)
        assert sender.wanted is wanted


@pytest.mark.parametrize(("engines", "passed"), [((SECOND,), [SECOND]), (("",), None)])
def test_the_trainer_learns_the_gpus_of_the_engines(engines, passed):
    trainer = Workers(FIRST, SECOND)
    refit(trainer, Workers(*engines), "ipc")
    assert trainer.calls["prepare_weights_for_ipc"].get("devices") == passed


@pytest.mark.parametrize(
    ("trainer", "engines", "clash"),
    [
        ((FIRST,), (FIRST,), True),
        ((FIRST,), (SECOND, SECOND), True),
        ((FIRST, SECOND), (SECOND,), False),  # only the trainer's rank 0 is in the group
        (("cpu 1",), ("cpu 1",), False),
    ],
)
def test_two_processes_on_a_gpu_are_rejected_in_a_process_group(trainer, engines, clash):
    if not clash:
        refit(Workers(*trainer), Workers(*engines), "collective")
        return
    with pytest.raises(ConfigError, match="two processes on the GPU GPU-"):
        refit(Workers(*trainer), Workers(*engines), "collective")

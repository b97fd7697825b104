"""Handles of GPU memory and the choice of processes that share it, as far as a machine without a GPU can show them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframework.base.errors import ConfigError
from rlframework.config.sections import RefitConfig
from rlframework.interfaces.generation import WeightReport
from rlframework.plugins.types import Capability
from rlframework.weight_sync.coordinator import Refitter
from rlframework.weight_sync.ipc import CudaHandle, IpcSender, device_id

CPU = torch.device("cpu")
FIRST, SECOND = "GPU-1", "GPU-2"


def rebuild(*arguments: Any) -> Any:
    return arguments


class Workers:
    """A stand-in for workers on `devices`, of the trainer or of an engine. `calls` has the methods called, in order."""

    name, in_driver = "an engine", False

    def __init__(self, devices: Sequence[str], calls: list[tuple[str, Any]]) -> None:
        self.devices, self.calls = devices, calls

    def run_all_workers_single_data(self, name: str, *, method: str, arguments: Any) -> Any:
        self.calls.append((method, arguments))
        return SimpleNamespace(method=method, devices=self.devices)

    start = run_all_workers_single_data

    def run_single_worker_single_data(self, name: str, worker: int, *, method: str, arguments: Any) -> Any:
        return SimpleNamespace(method=method, devices=self.devices[worker : worker + 1])

    def get_all_worker_results(self, future: Any, deadline: float | None = None) -> list[Any]:
        results = {
            "get_refit_state": lambda device: {"joined": False, "version": 1, "device": device},
            "prepare_info_for_collective": lambda _: {"a": ((2,), torch.float32)},
            "prepare_weights_for_ipc": lambda _: ([("a", 8)], 1e9),
            "get_weights_ipc_handles": lambda device: {device: "handle"},
            "offer_refit_memory": lambda _: {},
            "reserve_refit_address": lambda _: ("127.0.0.1", 1),
            "get_sent_checksums": lambda _: {"a": 1},
            "get_logprobs": lambda _: {"logprobs": None},
            "finish_weight_update": lambda _: WeightReport(1, {"a": 1}),
        }
        return [(results.get(future.method, lambda _: None)(device), "") for device in future.devices]

    results = get_all_worker_results


def refit(
    trainer: Sequence[str], engines: Sequence[str], transport: str = "ipc", *capabilities: Capability, times: int = 1
) -> list[tuple[str, Any]]:
    """The calls that `times` refits make, in order, with their arguments."""
    calls: list[tuple[str, Any]] = []
    policy: Any = SimpleNamespace(worker_group=Workers(trainer, calls), capabilities=frozenset(capabilities))
    answers = SimpleNamespace(rows=None, compare=lambda _: 0.0)
    of_version = SimpleNamespace(ask=lambda *_: calls.append(("probes", {})) or answers)
    probes: Any = SimpleNamespace(of_version=lambda _: of_version)
    handles = [Workers([device], calls) for device in engines]
    refitter = Refitter(policy, lambda: handles, RefitConfig(), probes, transport)
    for _ in range(times):
        refitter.refit()
    return calls


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
    (arguments,) = (given for name, given in refit((FIRST, SECOND), engines) if name == "prepare_weights_for_ipc")
    assert arguments.get("devices") == passed


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
        calls = refit(trainer, engines, "collective")
        assert [given for name, given in calls if name == "init_collective"] == [
            {"ip": "127.0.0.1", "port": 1, "world_size": 2, "rank": 1},
            {"ip": "127.0.0.1", "port": 1, "world_size": 2},
        ]
        return
    with pytest.raises(ConfigError, match="two processes on the GPU GPU-"):
        refit(trainer, engines, "collective")


def memory_moves(calls: Sequence[tuple[str, Any]]) -> list[str]:
    """The calls that move memory, the transfer, and those that use the engines and the trainer for probes."""
    moving = ("offload_before_refit", "offload_after_refit", "release", "restore")
    shown = ("get_weights_ipc_handles", "probes", "get_logprobs")
    return [" ".join((name, *given.get("tags", ()))) for name, given in calls if name in moving + shown]


OFFLOADED = [
    "offload_before_refit", "restore weights", "get_weights_ipc_handles", "offload_after_refit", "restore kv_cache",
    "probes", "release kv_cache", "get_logprobs", "offload_after_refit", "restore kv_cache",
]  # fmt: skip
NOT_OFFLOADED = [
    "restore weights", "get_weights_ipc_handles", "restore kv_cache", "probes", "get_logprobs",
]  # fmt: skip


@pytest.mark.parametrize(
    ("trainer", "engine", "expected"),
    [
        ([FIRST], FIRST, OFFLOADED),
        ([FIRST], "", OFFLOADED),  # an engine that does not know its device
        ([FIRST], SECOND, NOT_OFFLOADED),
        ([FIRST], "cpu", NOT_OFFLOADED),
        (["cpu"], "cpu", NOT_OFFLOADED),
        (["cpu"], "", NOT_OFFLOADED),
    ],
)
def test_trainer_and_caches_take_turns_on_a_gpu_that_they_share(trainer, engine, expected):
    assert memory_moves(refit(trainer, [engine], "ipc", Capability.CPU_OFFLOAD, times=2)) == expected * 2


def test_a_backend_that_cannot_offload_is_not_asked_to():
    assert memory_moves(refit([FIRST], [FIRST], "ipc", Capability.IPC_REFIT)) == NOT_OFFLOADED

"""A refit offloads the trainer only where that frees memory for an engine, and only if the backend can offload."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlframework.config.sections import RefitConfig
from rlframework.interfaces.generation import WeightReport
from rlframework.plugins.types import Capability
from rlframework.weight_sync.coordinator import Refitter

FIRST, SECOND, CPU = "GPU-1", "GPU-2", "cpu machine"
UNKNOWN = ""
"""The device of an engine that does not derive from `ReceivesWeights`."""


class Workers:
    """A stand-in for a worker group on `devices`, or for an engine on one; it has no weights to send or to receive."""

    name, in_driver = "engine", False

    def __init__(self, calls: list[str], *devices: str) -> None:
        self.calls, self.devices = calls, devices

    def run_all_workers_single_data(self, name: str, *, method: str, arguments: Any) -> Any:
        assert name == "attempt"
        if method in ("restore", "begin_weight_update"):
            self.calls.append(" ".join([method, *arguments.get("tags", ())]))
        report, nothing = WeightReport(1), dict[str, Any]()
        answers = {"prepare_weights_for_ipc": ([], 1e9), "finish_weight_update": report, "restore": 0}
        states = [{"device": device, "joined": False, "version": 1} for device in self.devices]
        if method == "get_refit_state":
            return [(state, "") for state in states]
        return [(answers.get(method, nothing), "") for _ in self.devices]

    def run_single_worker_single_data(self, name: str, rank: int, *, method: str, arguments: Any) -> Any:
        return self.run_all_workers_single_data(name, method=method, arguments=arguments)

    def get_all_worker_results(self, future: Any) -> list[Any]:
        return list(future)

    def start(self, name: str, /, **arguments: Any) -> Any:
        return self.run_all_workers_single_data(name, **arguments)

    def results(self, future: Any, deadline: float | None = None) -> list[Any]:
        return list(future)


def refit(trainer: list[str], engines: list[str], *capabilities: Capability) -> list[str]:
    """The calls that a refit makes on the policy and the engines, in order."""
    calls: list[str] = []
    policy: Any = SimpleNamespace(
        worker_group=Workers(calls, *trainer),
        capabilities=frozenset(capabilities),
        offload_before_refit=lambda: calls.append("offload_before_refit"),
        offload_after_refit=lambda: calls.append("offload_after_refit"),
    )
    handles: Any = [Workers(calls, device) for device in engines]
    Refitter(policy, lambda: handles, RefitConfig(), transport="ipc").refit()
    return list(dict.fromkeys(calls))


NOT_OFFLOADED = ["restore weights", "begin_weight_update", "restore kv_cache"]
OFFLOADED = ["offload_before_refit", *NOT_OFFLOADED[:2], "offload_after_refit", "restore kv_cache"]


@pytest.mark.parametrize(
    ("trainer", "engines", "expected"),
    [
        ([FIRST], [FIRST], OFFLOADED),
        ([FIRST, SECOND], [CPU, SECOND], OFFLOADED),
        ([FIRST], [UNKNOWN], OFFLOADED),
        ([FIRST], [SECOND], NOT_OFFLOADED),
        ([FIRST], [CPU], NOT_OFFLOADED),
        ([CPU], [CPU], NOT_OFFLOADED),
        ([CPU], [UNKNOWN], NOT_OFFLOADED),
    ],
)
def test_only_a_shared_gpu_is_cleared(trainer: list[str], engines: list[str], expected: list[str]) -> None:
    assert refit(trainer, engines, Capability.CPU_OFFLOAD) == expected


@pytest.mark.parametrize("device", [FIRST, CPU])
def test_a_backend_without_offload_is_never_asked_to_offload(device: str) -> None:
    assert refit([device], [device], Capability.IPC_REFIT) == NOT_OFFLOADED

"""A refit offloads the trainer only where that frees memory for an engine, and only if the backend can offload."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlframework.config.sections import RefitConfig
from rlframework.generation.driver import refit_policy_generation
from rlframework.plugins.types import Capability
from rlframework.weight_sync.coordinator import RefitReport, Refitter

FIRST, SECOND, CPU = "GPU-1", "GPU-2", "cpu machine"
UNKNOWN = ""
"""The device of an engine that does not derive from `ReceivesWeights`."""


class Workers:
    """A stand-in for a worker group whose workers are on `devices`."""

    def __init__(self, *devices: str) -> None:
        self.devices, self.questions = devices, 0

    def run_all_workers_single_data(self, name: str, *, method: str, arguments: Any) -> Any:
        assert (name, method, arguments) == ("attempt", "get_refit_state", {})
        self.questions += 1
        return SimpleNamespace()

    def get_all_worker_results(self, future: Any) -> list[Any]:
        return [({"device": device, "joined": False, "version": 1}, "") for device in self.devices]


def refit(trainer: Workers, engines: Workers, *capabilities: Capability, times: int = 1) -> list[str]:
    """The calls that `times` refits make on the policy and the engines, in order."""
    calls: list[str] = []
    refitter = Refitter(trainer, engines, RefitConfig())  # type: ignore[arg-type]
    refitter.refit = lambda *_: calls.append("refit") or RefitReport("ipc", 0, 0.0)  # type: ignore[method-assign]
    policy = SimpleNamespace(
        capabilities=frozenset(capabilities),
        offload_before_refit=lambda: calls.append("offload_before_refit"),
        offload_after_refit=lambda: calls.append("offload_after_refit"),
    )
    generation = SimpleNamespace(refitter=refitter, prepare_engines=lambda tags: calls.append(tags[0]))
    for _ in range(times):
        refit_policy_generation(policy, generation)  # type: ignore[arg-type]
    return calls


OFFLOADED = ["offload_before_refit", "weights", "refit", "offload_after_refit", "kv_cache"]
NOT_OFFLOADED = ["weights", "refit", "kv_cache"]


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
    assert refit(Workers(*trainer), Workers(*engines), Capability.CPU_OFFLOAD) == expected


@pytest.mark.parametrize("device", [FIRST, CPU])
def test_a_backend_without_offload_is_never_asked_to_offload(device: str) -> None:
    assert refit(Workers(device), Workers(device), Capability.IPC_REFIT) == NOT_OFFLOADED


def test_devices_are_asked_for_once() -> None:
    trainer, engines = Workers(FIRST), Workers(FIRST)
    assert refit(trainer, engines, Capability.CPU_OFFLOAD, times=3) == OFFLOADED * 3
    assert (trainer.questions, engines.questions) == (1, 1)

"""Faults on the way from a real trainer to vLLM are caught before the next optimizer step, with each backend.

The trainer runs in this environment and vLLM in that of `VLLM_PYTHON`. As `tests/weight_sync/test_faults_in_runs.py`,
with these differences:

    tied tensor                      by the comparison of the packed head with its embedding, at any learning rate
    tied tensor, after the checks    probes, within their bound
    stale prefix cache               probes; vLLM's own cache, neither dropped nor with the version as salt
    other truncation                 as there, a constant added to the log-probabilities
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_runs import OF_ADAPTERS, Trainer, make_model, opened, require_caught
from faulty_vllm import VLLM_FAULTS
from vllm_python import BESIDE_VLLM, PYTHON

pytestmark = BESIDE_VLLM
BACKENDS = ("dtensor", "deepspeed", "megatron")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("faults") / "llama")


ENGINE = (
    'plugins=["probe_tasks", "faulty_vllm"]',
    "generation.name=faulty_vllm",
    f"generation.workers={{group: ray, python: {PYTHON}}}",
    "generation.vllm.kv_cache_memory_bytes=67108864",
    "generation.refit.deadline=300",  # in which vLLM starts
)


@pytest.fixture(scope="module", params=BACKENDS)
def trainer(
    request: Any, tmp_path_factory: pytest.TempPathFactory, model: Path, ray_session: None
) -> Iterator[Trainer]:
    """One vLLM for all faults of a backend: it starts at the first refit. One Ray for all backends."""
    folder = tmp_path_factory.mktemp(request.param)
    with opened(folder, model, request.param, *ENGINE) as parts:
        yield Trainer(parts, folder)


@pytest.fixture(scope="module", params=BACKENDS)
def lora(request: Any, tmp_path_factory: pytest.TempPathFactory, model: Path, ray_session: None) -> Iterator[Trainer]:
    adapters = "policy.lora={rank: 4, alpha: 8, refit: adapters}"
    folder = tmp_path_factory.mktemp(request.param)
    with opened(folder, model, request.param, *ENGINE, adapters) as parts:
        yield Trainer(parts, folder)


@pytest.mark.parametrize("fault", sorted(VLLM_FAULTS.keys() - {OF_ADAPTERS}))
def test_a_fault_is_caught_before_the_next_step_and_a_sound_refit_recovers(trainer: Trainer, fault: str) -> None:
    require_caught(trainer, fault)


def test_an_adapter_that_is_not_delivered_is_caught_before_the_next_step(lora: Trainer) -> None:
    require_caught(lora, OF_ADAPTERS)

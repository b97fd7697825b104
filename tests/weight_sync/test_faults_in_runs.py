"""Faults on the way from a real trainer to an engine are caught before the next optimizer step, with each backend.

A run of GRPO trains once with sound weights; the refit after that step gets the fault, and must end the run. The same
workers then go on with a sound engine.

    fault                     caught by
    missing tensor            checksums; without them, the probes
    tied tensor               comparison with the embeddings, at any learning rate
      after the checks        probes, within their bound: not with a small learning rate
    reordered tensors         checksums; without them, the probes
    transposed tensor         checksums; without them, the probes
    wrong dtype               checksums
    scaled norm               probes, without checksums: a factor of 1.02 on the last norm
    exchanged rows            probes, without checksums: those of a tenth of the tokens
    partial commit            probes (without the fault, the engine counts what arrived)
    undelivered adapter       probes, in a run with LoRA
    stale prefix cache        probes, half of which repeat prompts
    stale encoder cache       not possible here: the model has no encoder, and requests no media
    lost buffer               probes
    old version               the report's version
    other truncation          probes; injected as a constant that is added to the log-probabilities
    update during decoding    the versions of the first result, before the first step
    frozen graph              probes: tokens after the first are of the earlier weights
    many rows                 probes: rows are, if more than four are decoded together
    long prompts              probes: what follows prompts of more than 48 tokens is
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_engines import FAULTS
from faulty_runs import OF_ADAPTERS, Trainer, make_model, opened, require_caught

pytestmark = pytest.mark.slow

BACKENDS = ("dtensor", "deepspeed", "megatron")
ENGINE = ('plugins=["probe_tasks", "faulty_engines"]', "generation.name=faulty", "generation.workers.group=processes")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("faults") / "llama")


@pytest.fixture(scope="module", params=BACKENDS)
def trainer(request: Any, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Trainer]:
    folder = tmp_path_factory.mktemp(request.param)
    with opened(folder, model, request.param, *ENGINE) as parts:
        yield Trainer(parts, folder)


@pytest.fixture(scope="module", params=BACKENDS)
def lora(request: Any, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Trainer]:
    adapters = "policy.lora={rank: 4, alpha: 8, refit: adapters}"
    folder = tmp_path_factory.mktemp(request.param)
    with opened(folder, model, request.param, *ENGINE, adapters) as parts:
        yield Trainer(parts, folder)


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - {OF_ADAPTERS}))
def test_a_fault_is_caught_and_a_sound_refit_recovers(trainer: Trainer, fault: str) -> None:
    require_caught(trainer, fault)


def test_an_adapter_that_is_not_delivered_is_caught_before_the_next_step(lora: Trainer) -> None:
    require_caught(lora, OF_ADAPTERS)

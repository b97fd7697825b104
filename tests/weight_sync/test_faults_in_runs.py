"""Faults on the way from a real trainer to an engine are caught before the next optimizer step, with each backend.

A run of GRPO trains once with sound weights; the refit after that step gets the fault, and must end the run. The same
workers then go on with a sound engine.

    fault                     caught by
    missing tensor            checksums; without them, the probes
    tied tensor               probes
    reordered tensors         checksums; without them, the probes
    transposed tensor         checksums; without them, the probes
    wrong dtype               checksums
    partial commit            probes (without the fault, the engine counts what arrived)
    undelivered adapter       probes, in a run with LoRA
    stale prefix cache        probes, half of which repeat prompts
    stale encoder cache       not possible here: the model has no encoder, and requests no media
    lost buffer               probes
    old version               the report's version
    other truncation          probes
    update during decoding    the versions of the rollout's tokens, before the first step
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_engines import FAULTS

from rlframework.errors import EngineNotReady, RefitError
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

BACKENDS = ("dtensor", "deepspeed", "megatron")
MESSAGES = {
    "old version": r"finished its update with version \d+; the trainer sent",
    "update during decoding": "sampled with weights of versions",
    "wrong dtype": "checksum",
}
BY_PROBES = "is allowed .generation.refit.probe_bound"
OF_ADAPTERS, WHILE_SAMPLING = "undelivered adapter", "update during decoding"


class Trainer:
    """The parts of a run whose engine has faults."""

    def __init__(self, parts: Any, folder: Path) -> None:
        self.parts, self.saved, (self.engine,) = parts, str(folder / "saved"), parts.generation.client.engines
        parts.policy.save_checkpoint(self.saved, None)

    def begin(self) -> None:
        """Give trainer and engine the first weights: those of many steps no longer change."""
        self.on_workers("load_checkpoint", weights_path=self.saved)
        self.parts.generation.prepare_for_generation()

    def run(self) -> None:
        """Take the steps of the run, each after a refit unless the weights are those of the engine."""
        from rlframework.algorithms.grpo import GRPO

        GRPO(self.parts).run()

    def inject(self, fault: str) -> None:
        self.engine.call("inject", fault=fault)

    @property
    def version(self) -> int:
        """The number of optimizer steps taken."""
        return int(self.on_workers("get_refit_state")[0]["version"])

    def on_workers(self, method: str, **arguments: Any) -> list[Any]:
        group = self.parts.policy.worker_group
        results: list[Any] = group.get_all_worker_results(group.run_all_workers_single_data(method, **arguments))
        return results


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights so large that each of them matters; a square projection, heads as vLLM takes them, a tied head."""
    tokenizer = character_tokenizer("0123456789+= ?abcdefghijklmnopqrstuvwxyzUASI:\n<>|_")
    return make_llama(
        tmp_path_factory.mktemp("faults") / "llama", tokenizer, hidden=64, layers=2, heads=2, kv_heads=2, init_std=0.4
    )


def opened(make_config: Any, folder: Path, model: Path, backend: str, *options: str) -> Any:
    from rlframework.runner.parts import build_parts

    keys = (
        'plugins=["probe_tasks", "faulty_engines"]',
        f"policy.model_name={model}",
        f"policy.backend={backend}",
        "policy.optimizer.lr=0.03",
        "policy.train_global_batch_size=32",  # the rows of a step, so it is one step of the optimizer
        "observers.jsonl=false",
        "algorithm.num_steps=2",
        "algorithm.validation={at_start: false, at_end: false, every: 0}",
        "worker_group.name=processes",
        "generation.name=faulty",
        "generation.workers.group=processes",
    )
    return build_parts(make_config(folder, "grpo", *keys, *options))


@pytest.fixture(scope="module", params=BACKENDS)
def trainer(request: Any, make_config: Any, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Trainer]:
    folder = tmp_path_factory.mktemp(request.param)
    with opened(make_config, folder, model, request.param) as parts:
        yield Trainer(parts, folder)


@pytest.fixture(scope="module", params=BACKENDS)
def lora(request: Any, make_config: Any, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Trainer]:
    adapters = "policy.lora={rank: 4, alpha: 8, refit: adapters}"
    folder = tmp_path_factory.mktemp(request.param)
    with opened(make_config, folder, model, request.param, adapters) as parts:
        yield Trainer(parts, folder)


def require_caught(trainer: Trainer, fault: str) -> None:
    """A sound refit, one step, the fault at the refit after it; then two steps with a sound engine."""
    trainer.begin()
    before = trainer.version
    trainer.inject(fault)
    with pytest.raises(RefitError, match=MESSAGES.get(fault, f"checksum|{BY_PROBES}")) as raised:
        trainer.run()
    if "no checksums" in fault:
        assert "checksum" not in str(raised.value)
    assert trainer.version == before + (0 if fault == WHILE_SAMPLING else 1)
    if fault != WHILE_SAMPLING:  # whose refit was sound
        with pytest.raises(EngineNotReady, match="last refit failed"):
            trainer.parts.generation.refitter.require_committed()
    trainer.inject("")
    sound = trainer.version
    trainer.run()
    assert trainer.version > sound


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - {OF_ADAPTERS}))
def test_a_fault_is_caught_before_the_next_step_and_a_sound_refit_recovers(trainer: Trainer, fault: str) -> None:
    require_caught(trainer, fault)


def test_an_adapter_that_is_not_delivered_is_caught_before_the_next_step(lora: Trainer) -> None:
    require_caught(lora, OF_ADAPTERS)

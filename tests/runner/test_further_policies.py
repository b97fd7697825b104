"""Further policies of a run: built with it, trained, saved and resumed with it, on any backend and worker group."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_runs import assert_same_weights, numbers_of, refused, rows_of
from safetensors.torch import load_file

from rlframework import load_config, run
from rlframework.base.errors import ConfigError
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.runner.launch import resume
from rlframework_tools.estimates.printing import estimate_run

pytestmark = pytest.mark.slow

BACKENDS = ("dtensor", "deepspeed", "megatron")


@pytest.fixture
def followed(run_config: Any):
    """`followed(*overrides)`: supervised training of the policy, and of a critic that begins as the policy."""

    def config(*overrides: str) -> Any:
        values = run_config("sft").model_dump(mode="json")
        values["plugins"] = ["probe_tasks", "probe_further"]
        values["algorithm"]["name"] = "followed"
        return load_config(values, ["critic={head: language}", *overrides])

    return config


def critic_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "critic" / "model.safetensors")


@pytest.mark.parametrize(
    ("backend", "group"), [("dtensor", "processes"), *((backend, "inline") for backend in BACKENDS)]
)
def test_a_critic_that_begins_as_the_policy_is_trained_like_it(followed, tmp_path, backend, group):
    """Whatever its backend and its process: each model has its own optimizer, and neither disturbs the other."""
    run(
        followed(
            f"critic={{head: language, backend: {backend}, worker_group: {{name: {group}}}}}",
            "policy.max_grad_norm=null",
        )
    )
    for row in rows_of(tmp_path / "run")[1:]:
        assert row["train/critic_loss"] == pytest.approx(row["train/loss"], rel=1e-5)
    wanted, trained = load_file(tmp_path / "run" / "model" / "model.safetensors"), critic_weights(tmp_path / "run")
    assert trained.keys() == wanted.keys()
    for name, weight in trained.items():
        assert (weight - wanted[name]).norm() < 1e-4 * wanted[name].norm(), name


@pytest.mark.thorough
def test_a_run_is_resumed_with_its_critic_bit_for_bit(followed, tmp_path):
    """The critic has its own learning rate, schedule, backend and process."""
    options = ["critic.optimizer.lr=3e-3", "critic.scheduler={name: linear}", "algorithm.num_steps=4"]
    options += ["critic.worker_group.name=processes", "checkpoints.every=2", "algorithm.validation.at_end=false"]
    run(followed(f"output_dir={tmp_path}/whole", *options))
    run(followed(f"output_dir={tmp_path}/two", *options, "algorithm.num_steps=2", "critic.scheduler.total_steps=4"))
    folder = tmp_path / "two" / "checkpoints" / "step-000002" / "critic"
    assert {path.name for path in folder.iterdir()} == {"model", "optimizer"}
    resume(tmp_path / "two", ["algorithm.num_steps=4"])
    whole, two = numbers_of(tmp_path / "whole"), numbers_of(tmp_path / "two")
    assert [whole[step] for step in (3, 4)] == [two[step] for step in (3, 4)]
    assert [row["train/critic_lr"] for row in rows_of(tmp_path / "whole")[1:]] == pytest.approx(
        [3e-3, 2.25e-3, 1.5e-3, 0.75e-3]
    )
    assert_same_weights(tmp_path / "whole", tmp_path / "two")
    wanted = critic_weights(tmp_path / "whole")
    assert all(torch.equal(weight, wanted[name]) for name, weight in critic_weights(tmp_path / "two").items())


def test_a_teacher_is_not_trained_and_not_saved(followed, tmp_path):
    options = ["algorithm.with_teacher=true", "teacher={worker_group: {name: processes, num_workers: 2}}"]
    run(followed(*options, "checkpoints.every=3", "algorithm.num_steps=3"))
    rows = rows_of(tmp_path / "run")[1:]
    assert all(math.isfinite(row["train/teacher_logprob"]) for row in rows)
    assert not list((tmp_path / "run").rglob("*teacher*"))
    assert rows[0]["train/teacher_logprob"] == pytest.approx(-rows[0]["train/loss"], rel=1e-5)  # the policy's weights


def test_sections_that_are_missing_or_not_used(followed, run_config):
    assert "needs the section 'critic'" in refused(followed("~critic"), ConfigError)
    assert "the section 'teacher' is not used" in refused(followed("teacher={}"), ConfigError)
    assert "reads no such section" in refused(run_config("sft", "critic={}"), ConfigError)


def test_a_teacher_with_other_tokens_is_rejected(followed, tmp_path):
    other = make_llama(tmp_path / "other", character_tokenizer("0123456789+= "), hidden=32, layers=1, heads=2)
    config = followed("algorithm.with_teacher=true", f"teacher={{model_name: {other}}}")
    assert "teacher reads the tokens of the policy" in refused(config, ConfigError)
    smaller = followed("algorithm.with_teacher=true", f"teacher={{model_name: {other}, tokenizer_name: null}}")
    smaller = load_config(smaller, [f"teacher.tokenizer_name={smaller.policy.model_name}"])
    assert "has embeddings of 15 tokens" in refused(smaller, ConfigError)


def test_a_model_with_fewer_positions_limits_the_rows(followed, tmp_path, tiny_llama):
    from rlframework.huggingface.tokenizer import load_tokenizer

    short = make_llama(
        tmp_path / "short", load_tokenizer(str(tiny_llama)), hidden=32, layers=1, heads=2, max_positions=4
    )
    message = refused(followed(f"critic={{head: language, model_name: {short}}}"), Exception)
    assert f"the model (critic.model_name={short}) takes 4 tokens" in message


def test_the_estimate_has_each_model(followed):
    config = followed("algorithm.with_teacher=true", "teacher={worker_group: {name: processes, num_workers: 2}}")
    found = estimate_run(config)
    parts = {name: {use.name for use in each.memory} for name, each in found.further.items()}
    assert "moments" in parts["critic"]
    assert not {"moments", "gradients"} & parts["teacher"]
    assert found.host_bytes == sum(
        each.config.worker_group.num_workers * sum_of_peak(each) for each in (found, *found.further.values())
    )
    assert any(name.startswith("critic: trained model") for name in found.disk)
    assert not any(name.startswith("teacher") for name in found.disk)
    lines = found.lines()
    assert any("teacher: " in line and "(2 workers)" in line for line in lines)


def sum_of_peak(found: Any) -> int:
    from rlframework_tools.estimates.worker_memory import peak

    return peak(found.memory, "host")

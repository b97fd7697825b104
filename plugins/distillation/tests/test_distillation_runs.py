"""Runs of distillation: the divergence of a teacher and a student is that of their models, and falls in every mode."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_runs import numbers_of, refused
from transformers import AutoModelForCausalLM

from rlframework import build_parts, load_config, run
from rlframework.base.errors import ConfigError
from rlframework.datasets.tokens import TokenData
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.runner.launch import resume
from rlframework_distillation.teacher_data import write_teacher_data
from rlframework_tools.tokenize import tokenize

pytestmark = pytest.mark.slow

ONE_STEP = ["algorithm.num_steps=1", "policy.optimizer.lr=1e-30"]


@pytest.fixture
def teacher(tmp_path: Path, tiny_llama: Path) -> Path:
    """Another tiny model with the tokenizer of the student; its distributions are not flat."""
    path = make_llama(tmp_path / "teacher", load_tokenizer(str(tiny_llama)), hidden=32, layers=1, heads=2, seed=8)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(path)
    return path


@pytest.fixture
def distilled(run_config: Any, teacher: Path):
    """`distilled(*overrides)`: a short run with that teacher."""

    def config(*overrides: str) -> Any:
        values = run_config("sft").model_dump(mode="json", exclude_unset=True)
        values["algorithm"] = {"name": "distillation", "num_steps": 30, "validation": {"every": 0, "samples": 8}}
        return load_config(values, [f"teacher.model_name={teacher}", "policy.optimizer.lr=1e-2", *overrides])

    return config


def held_out_logprobs(config: Any, teacher: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities `[N, V]` of teacher and student at each token of the held-out completions, in float64."""
    tokenizer, found = load_tokenizer(config.policy.model_name), []
    with build_parts(config) as parts:
        samples = parts.environment.samples("validation")[:8]
    for path in (teacher, config.policy.model_name):
        model, rows = AutoModelForCausalLM.from_pretrained(path).double(), []
        for sample in samples:
            prompt = tokenizer(sample.messages[0]["content"], add_special_tokens=False)["input_ids"]
            answer = tokenizer(sample.completion, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer])).logits[0]
            rows.append(logits[len(prompt) - 1 : -1].log_softmax(-1))
        found.append(torch.cat(rows))
    return found[0], found[1]


@pytest.mark.parametrize("tokens", ["teacher_top_k", "student_top_k", "all"])
def test_the_held_out_divergence_is_that_of_the_models(distilled, teacher, tokens):
    config = distilled(
        f"algorithm.tokens={tokens}", "algorithm.top_k=3", "algorithm.loss={divergence: jsd, beta: 0.3}",
        "algorithm.student_fraction=0.5", *ONE_STEP,
    )  # fmt: skip
    p, q = held_out_logprobs(config, teacher)
    if tokens != "all":
        chosen = (p if tokens == "teacher_top_k" else q).topk(3).indices
        p, q = (each.gather(1, chosen) for each in (p, q))
        p, q = (torch.cat((each, (1 - each.exp().sum(1, keepdim=True)).log()), 1) for each in (p, q))
    m = (0.3 * p.exp() + 0.7 * q.exp()).log()
    expected = (0.3 * p.exp() * (p - m) + 0.7 * q.exp() * (q - m)).sum(1).mean()
    rows = run(config).history
    assert rows[0]["validation/divergence"] == pytest.approx(float(expected), rel=1e-5)
    assert rows[1]["train/student_rows"] == 8


MODES = {
    "on_policy_reverse": [],
    "on_policy_forward": ["algorithm.loss.divergence=forward_kl"],
    "student_tokens": ["algorithm.tokens=student_top_k", "algorithm.loss.divergence=jsd", "algorithm.top_k=8"],
    "sampled": ["algorithm.tokens=sampled", "algorithm.num_steps=60"],
    "data": ["algorithm.student_fraction=0", "algorithm.loss={divergence: forward_kl, rest: omit}"],
    "mixture": ["algorithm.student_fraction=0.5", "algorithm.loss={divergence: jsd, sft_weight: 0.01}"],
    "trl": ["algorithm.preset=trl"],
}


@pytest.mark.parametrize("mode", MODES)
def test_the_divergence_falls(distilled, mode):
    rows = run(distilled(*MODES[mode])).history
    trained = [row["train/divergence"] for row in rows[1:]]
    assert sum(trained[-5:]) < 0.7 * sum(trained[:5])
    assert rows[-1]["validation/divergence"] < rows[0]["validation/divergence"]
    assert all(math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0 for row in rows[1:])


@pytest.mark.parametrize(("backend", "group"), [("deepspeed", "inline"), ("megatron", "processes")])
def test_a_teacher_has_any_backend_and_its_own_processes(distilled, tmp_path, backend, group):
    more = ["algorithm.num_steps=2", "algorithm.student_fraction=0.5"]
    run(distilled(f"output_dir={tmp_path}/plain", *more))
    run(
        distilled(
            f"output_dir={tmp_path}/other", f"teacher.backend={backend}", f"teacher.worker_group.name={group}", *more
        )
    )
    plain, other = numbers_of(tmp_path / "plain"), numbers_of(tmp_path / "other")
    for step in plain:
        for name in ("train/loss", "train/grad_norm", "validation/divergence"):
            if name in plain[step]:
                assert other[step][name] == pytest.approx(plain[step][name], rel=1e-4), (step, name)


@pytest.mark.thorough
def test_a_run_is_resumed_bit_for_bit(distilled, tmp_path):
    """The mixture of rows and the prompts go on where they were."""
    more = ["algorithm.student_fraction=0.3", "checkpoints.every=1", "algorithm.validation.at_end=false"]
    run(distilled(f"output_dir={tmp_path}/whole", "algorithm.num_steps=3", *more))
    run(distilled(f"output_dir={tmp_path}/two", "algorithm.num_steps=2", *more))
    resume(tmp_path / "two", ["algorithm.num_steps=3"])
    assert numbers_of(tmp_path / "two")[3] == numbers_of(tmp_path / "whole")[3]


def test_stored_log_probabilities_are_as_good_as_the_teacher(distilled, run_config, teacher, tmp_path):
    """A run with them has the losses of a run whose teacher scores the same rows in the same order."""
    rows = tmp_path / "rows"
    tokenize(run_config("sft"), rows)
    with build_parts(run_config("sft", f"policy.model_name={teacher}")) as parts:
        write_teacher_data(tmp_path / "stored", TokenData(rows), parts.policy, top_k=4, name="teacher")
    more = ["algorithm.num_steps=3", "algorithm.top_k=4", "algorithm.student_fraction=0"]
    run(distilled(f"output_dir={tmp_path}/live", *more))
    stored = f"algorithm.teacher_data={tmp_path}/stored"
    run(distilled(f"output_dir={tmp_path}/off", "~teacher", stored, *more))
    live, off = numbers_of(tmp_path / "live"), numbers_of(tmp_path / "off")
    for step in (1, 2, 3):
        assert off[step]["train/loss"] == pytest.approx(live[step]["train/loss"], rel=1e-5)
        assert off[step]["train/grad_norm"] == pytest.approx(live[step]["train/grad_norm"], rel=1e-4)
    message = refused(distilled("~teacher", stored, "generation.temperature=0.5", *more), ConfigError)
    assert "log-probabilities at temperature 1" in message


def test_settings_of_which_the_run_would_make_nothing(distilled):
    assert "needs the section 'teacher'" in refused(distilled("~teacher"), ConfigError)
    with pytest.raises(ConfigError, match="greedy completions are not samples"):
        distilled("algorithm.tokens=sampled", "generation.temperature=0")

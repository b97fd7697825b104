"""Runs of reward-model training: a tiny model learns which answers are preferred, and which steps are right."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframework import resume, run
from rlframework.base.errors import ConfigError, DataError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.environment import Sample
from rlframework_preferences.reward_model_training import ProcessRewardModelTraining

ENVIRONMENT = "environment={name: preferences, path: %s, validation_fraction: 0.25}"
NEW_HEAD = "policy.head_init=zeros"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pairs_file(folder: Path, count: int = 64, **more: Any) -> Path:
    """Pairs whose chosen answer has even digits, and whose rejected one has odd digits; of one or two digits."""
    rows = []
    for number in range(count):
        even, odd = 2 * (number % 5), 2 * (number * 3 % 5) + 1
        chosen, rejected = str(even) * (1 + number % 2), str(odd) * (1 + number // 2 % 2)
        rows.append({"prompt": f"{number}?", "chosen": chosen, "rejected": rejected, **more})
    return write(folder / "pairs.jsonl", rows)


def steps_file(folder: Path, count: int = 64) -> Path:
    """Answers of two steps of one or two digits: right if the digits are even."""
    rows = []
    for number in range(count):
        digits = (number % 10, (number * 7 + number // 10) % 10)
        steps = [str(digit) * (1 + number % 2) for digit in digits]
        rows.append({"prompt": f"{number}?", "completions": steps, "labels": [digit % 2 == 0 for digit in digits]})
    return write(folder / "steps.jsonl", rows)


def options(path: Path, head: str, *more: str) -> list[str]:
    given = ["~environment", ENVIRONMENT % path, "generation.max_new_tokens=1", f"policy.head={head}", *more]
    return given if head == "language" else [*given, NEW_HEAD]


LEARNS = ("algorithm.num_steps=40", "policy.optimizer.lr=3e-3", "algorithm.validation.every=20")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dtensor", "deepspeed", "megatron"])
def test_a_reward_model_learns_held_out_pairs(run_config: Any, tmp_path: Path, backend: str) -> None:
    """The first loss is log 2, as a new head scores 0; the saved model is one that transformers loads."""
    from transformers import AutoModelForSequenceClassification

    path = pairs_file(tmp_path, margin=0.5)
    more = [*LEARNS, f"policy.backend={backend}", "algorithm.margin_coef=0.1", "algorithm.centering_coef=0.01"]
    config = run_config("reward_model", *options(path, "score", *more))
    result = run(config)
    first, *_, last = [entry for entry in result.history if "validation/accuracy" in entry]
    assert first["validation/accuracy"] == 0.5
    assert first["validation/loss"] == pytest.approx(0.7184597, abs=1e-6)  # log(1 + e^0.05), by the margin
    assert last["validation/accuracy"] >= 0.875
    assert last["validation/accuracy_low"] < last["validation/accuracy"] <= last["validation/accuracy_high"]
    assert last["validation/margin"] > 0.5
    assert last["train/centering_loss"] >= 0
    saved = AutoModelForSequenceClassification.from_pretrained(config.output_dir / "model")
    assert saved.config.num_labels == 1
    assert saved.score.weight.abs().sum() > 0


@pytest.mark.slow
def test_a_process_reward_model_learns_held_out_steps(run_config: Any, tmp_path: Path) -> None:
    more = [*LEARNS, "algorithm.separator=+"]
    result = run(run_config("process_reward_model", *options(steps_file(tmp_path), "value", *more)))
    first, *_, last = [entry for entry in result.history if "validation/accuracy" in entry]
    assert first["validation/loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert last["validation/step_accuracy"] >= 0.9
    assert last["validation/accuracy"] >= 0.75
    assert last["validation/accuracy_low"] < last["validation/accuracy"] <= last["validation/accuracy_high"]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_reward_model_resumes(run_config: Any, tmp_path: Path) -> None:
    more = ["algorithm.num_steps=4", "policy.optimizer.lr=3e-3", "checkpoints.every=2", "checkpoints.keep_last=2"]
    config = run_config("reward_model", *options(pairs_file(tmp_path), "score", *more))
    whole = run(config)
    for folder in config.output_dir.glob("checkpoints/*4"):
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()
    assert resume(config.output_dir).metrics["train/loss"] == whole.metrics["train/loss"]


@pytest.mark.slow
def test_mistakes_are_found_before_the_start(run_config: Any, tmp_path: Path) -> None:
    pairs, steps = pairs_file(tmp_path, 12), steps_file(tmp_path, 12)
    with pytest.raises(ConfigError, match=r"reward_model trains a model with policy\.head=score, but it is language"):
        run(run_config("reward_model", *options(pairs, "language")))
    with pytest.raises(ConfigError, match=r"algorithm\.name=dpo trains a model with policy\.head=language"):
        run(run_config("dpo", *options(pairs, "score")))
    with pytest.raises(ConfigError, match=r"remove recording\.steps"):
        run(run_config("reward_model", *options(pairs, "score", "recording.steps=[1]")))
    with pytest.raises(ConfigError, match=r"(?s)policy\.train_global_batch_size.*3 rows are not whole pairs"):
        run_config("reward_model", *options(pairs, "score", "policy.train_global_batch_size=3"))
    with pytest.raises(DataError, match=r"has no margin, which algorithm\.margin_coef needs"):
        run(run_config("reward_model", *options(pairs, "score", "algorithm.margin_coef=1.0")))
    with pytest.raises(DataError, match="is not a preference pair"):
        run(run_config("reward_model", *options(steps, "score")))
    with pytest.raises(DataError, match="has no labelled steps"):
        run(run_config("process_reward_model", *options(pairs, "value")))


def test_steps_are_read_at_the_token_after_each(run_config: Any, tmp_path: Path, tiny_llama: Any) -> None:
    """Steps of 2, 1 and 3 characters, a separator each, and an end: labels at tokens 3, 5 and 9 after the prompt."""
    training = object.__new__(ProcessRewardModelTraining)
    tokenizer = load_tokenizer(str(tiny_llama))
    training.parts = SimpleNamespace(tokenizer=tokenizer)  # type: ignore[assignment]
    training.config = SimpleNamespace(separator="+", max_tokens=None)  # type: ignore[assignment]
    found = Sample(
        "a", ({"role": "user", "content": "1?"},), "", "12", {"steps": ("12", "3", "456"), "labels": (1, 0, 0.5)}
    )
    prompt = len(tokenizer.encode("1?", add_special_tokens=False)) + (tokenizer("").input_ids != [])
    data = training.encode([found])
    marked = data["token_mask"][0].nonzero()[:, 0]
    assert (marked - prompt).tolist() == [3, 5, 9]
    assert data["step_labels"][0, marked].tolist() == [1.0, 0.0, 0.5]
    assert int(data["input_lengths"][0]) == prompt + 10
    assert data["input_ids"][0, -1] == tokenizer.eos_token_id
    training.config.max_tokens = prompt + 6
    assert (training.encode([found])["token_mask"][0].nonzero()[:, 0] - prompt).tolist() == [3, 5]
    assert torch.equal(training.encode([found, found])["sample_mask"], torch.ones(2))


@pytest.mark.parametrize("metadata", [{"steps": "ab", "labels": (1, 0)}, {"steps": ("a", "b"), "labels": "10"}])
def test_steps_of_an_own_environment_are_lists(metadata: dict[str, Any]) -> None:
    training = object.__new__(ProcessRewardModelTraining)
    training.parts = SimpleNamespace(tokenizer=None)  # type: ignore[assignment]
    training.config = SimpleNamespace(separator="+", max_tokens=None)  # type: ignore[assignment]
    with pytest.raises(DataError, match=r"sample 'a' has no labelled steps: it needs .*'steps'\], a list of texts"):
        training.encode([Sample("a", ({"role": "user", "content": "1?"},), "", "ab", metadata)])


def test_answers_without_a_step_left_do_not_count() -> None:
    """Of three answers one has a wrong step, and one lost its steps to `max_tokens`: 1 of 2 answers, 3 of 4 steps."""
    mask = torch.tensor([[0.0, 1, 1], [0, 1, 1], [0, 0, 0]])
    labels = torch.tensor([[0.0, 1, 0], [0, 1, 1], [0, 0, 0]])
    rows = {"token_mask": mask, "sample_mask": torch.ones(3), "step_labels": labels}
    values = torch.tensor([[9.0, 1, -1], [9, 1, -1], [9, 9, 9]])
    policy = SimpleNamespace(prepare_for_lp_inference=lambda: None, get_values=lambda *_, **__: {"values": values})
    training = object.__new__(ProcessRewardModelTraining)
    training.parts, training.loss = SimpleNamespace(policy=policy), training.make_loss()  # type: ignore[assignment]
    training.held_out = BatchedDataDict(rows)
    found, _ = training.validate(1)
    assert found["validation/accuracy"] == 0.5
    assert found["validation/samples"] == 2
    assert found["validation/step_accuracy"] == 0.75
    # three steps cost log(1 + e^-1) = 0.3132617, the wrong one log(1 + e) = 1.3132617
    assert found["validation/loss"] == pytest.approx((3 * 0.3132617 + 1.3132617) / 4, abs=1e-6)

"""Runs on preference pairs: a tiny model learns a preference, and every algorithm takes its steps."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframework import run
from rlframework.base.errors import BatchError, ConfigError, DataError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.cli import main
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.messages import Message
from rlframework_preferences.config import DPOConfig
from rlframework_preferences.pairs import mismatched_rows
from rlframework_preferences.preference_training import PreferenceTraining

PREFERENCES = "environment={name: preferences, path: %s, validation_fraction: 0.25}"


def pairs_file(folder: Path, count: int = 64) -> Path:
    """Pairs whose chosen answer has even digits, and whose rejected one has odd digits; of one or two digits."""
    rows = []
    for number in range(count):
        even, odd = 2 * (number % 5), 2 * (number * 3 % 5) + 1
        chosen, rejected = str(even) * (1 + number % 2), str(odd) * (1 + number // 2 % 2)
        rows.append({"prompt": f"{number}?", "chosen": chosen, "rejected": rejected})
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def options(path: Path, *more: str) -> list[str]:
    return ["~environment", PREFERENCES % path, "generation.max_new_tokens=1", *more]


@pytest.mark.slow
def test_dpo_raises_the_accuracy_on_held_out_pairs(run_config: Any, tmp_path: Path) -> None:
    more = ["algorithm.num_steps=40", "policy.optimizer.lr=3e-3", "algorithm.validation.every=20", "algorithm.beta=0.5"]
    result = run(run_config("dpo", *options(pairs_file(tmp_path), *more)))
    scores = [entry for entry in result.history if "validation/accuracy" in entry]
    first, last = scores[0], scores[-1]
    assert first["validation/accuracy"] == 0.5  # the policy is the reference: all margins are 0
    assert first["validation/margin"] == 0.0
    assert first["validation/loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert result.history[1]["train/loss"] == pytest.approx(0.6931472, abs=1e-5)
    assert last["validation/samples"] == 8  # as many as short runs validate with
    assert last["validation/accuracy"] >= 0.875
    assert last["validation/accuracy_low"] < last["validation/accuracy"] <= last["validation/accuracy_high"]
    assert last["validation/loss"] < 0.5
    assert last["validation/margin"] > 0.5


@pytest.mark.slow
def test_held_out_pairs_are_compared_with_the_reference_of_the_step(run_config: Any, tmp_path: Path) -> None:
    """A policy that equals its reference has a loss of log 2: only at the start, as one moves after the validation.

    The reference that moved after step 2 is that of the validation after step 3.
    """
    keys = options(pairs_file(tmp_path, 16), "policy.optimizer.lr=1e-2")
    losses = []
    for name, more in (("moved", ", reference_sync: {steps: 2, alpha: 1.0}"), ("kept", "")):
        algorithm = f"algorithm={{num_steps: 3, validation: {{every: 1}}{more}}}"
        history = run(run_config("dpo", *keys, algorithm, f"output_dir={tmp_path / name}")).history
        losses.append([row["validation/loss"] for row in history])
    moved, kept = losses
    assert [abs(loss - math.log(2)) < 1e-6 for loss in moved] == [True, False, False, False]
    assert moved[:3] == kept[:3]
    assert abs(moved[3] - kept[3]) > 1e-4


def test_the_settings_that_evaluate_names_evaluate_the_model(run_config: Any, tmp_path: Path, capsys: Any) -> None:
    """The run's configuration has keys that only the environment of pairs has, such as `columns.chosen`."""
    config = run_config("dpo", *options(pairs_file(tmp_path, 16), "algorithm.num_steps=1"))
    run(config)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(8)), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(config.output_dir)])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    settings = re.search(r"give rows with answers \((.*)\), or", printed)
    assert settings is not None, printed
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(config.output_dir), *settings[1].replace("FILE", str(rows)).split(" ")])
    assert ended.value.code == 0
    assert "accuracy" in capsys.readouterr().out


def test_pairs_that_max_tokens_makes_equal_are_counted(tiny_llama: Any, caplog: Any) -> None:
    """Prompts of two tokens: the answers 12 and 13 differ in the fourth, and 1 and 12 in the length."""
    training = object.__new__(PreferenceTraining)
    training.parts = SimpleNamespace(tokenizer=load_tokenizer(str(tiny_llama)), images=None)  # type: ignore[assignment]
    asked: tuple[Message, ...] = ({"role": "user", "content": "1?"},)
    samples = [
        Sample(name, asked, "", good, {"rejected": bad}) for name, good, bad in (("a", "12", "13"), ("b", "1", "12"))
    ]
    for cut, warned in ((None, 0), (4, 0), (3, 2)):
        training._alike, training.config = {}, DPOConfig(max_tokens=cut)
        training.longest_rows(samples)
        training._warn_of_equal_rows()
        assert len(training._alike) == warned
    [record] = caplog.records
    assert record.getMessage() == (
        "2 of the checked pairs have the same tokens in both rows, after truncation to algorithm.max_tokens=3, which "
        "teach nothing; the first: sample 'a'. Remove them"
    )


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ipo", "simpo", "orpo", "kto"])
def test_other_losses_take_their_steps(run_config: Any, tmp_path: Path, algorithm: str) -> None:
    more = ["algorithm.num_steps=8", "policy.optimizer.lr=3e-3", "algorithm.max_tokens=5"]
    if algorithm == "orpo":
        more.append("algorithm.sft_mean=token")
    result = run(run_config(algorithm, *options(pairs_file(tmp_path), *more)))
    scores = [entry for entry in result.history if "validation/loss" in entry]
    assert scores[-1]["validation/loss"] < scores[0]["validation/loss"]
    assert scores[-1]["validation/margin"] > scores[0]["validation/margin"]
    assert ("train/kl_estimate" in result.metrics) == (algorithm == "kto")


@pytest.mark.slow
def test_mistakes_are_found_before_the_start(run_config: Any, tmp_path: Path) -> None:
    path = pairs_file(tmp_path, 12)
    with pytest.raises(
        ConfigError, match=r"(?s)policy\.train_global_batch_size.*3 rows are not whole pairs of two rows, at least 1"
    ):
        run_config("dpo", *options(path, "policy.train_global_batch_size=3"))
    with pytest.raises(
        ConfigError, match=r"(?s)policy\.train_global_batch_size.*2 rows are not whole pairs of two rows, at least 2"
    ):
        run_config("kto", *options(path, "policy.train_global_batch_size=2"))
    with pytest.raises(ConfigError, match=r"(?s)policy\.train_micro_batch_size.*has no room for a pair"):
        run_config("dpo", *options(path, "policy.batching={mode: padded}", "policy.train_micro_batch_size=1"))
    with pytest.raises(ConfigError, match=r"(?s)generation\.temperature.*preferences are trained at 1"):
        run_config("dpo", *options(path, "generation.temperature=0.7"))
    with pytest.raises(ConfigError, match=r"(?s)environment\.name.*preferences has no rewards"):
        run_config("grpo", *options(path))
    with pytest.raises(DataError, match="is not a preference pair: it needs a completion, and a rejected answer"):
        run(run_config("dpo"))


def test_mismatched_rows_have_the_answer_to_the_next_prompt() -> None:
    prompts = torch.tensor([2, 2, 1, 1, 3, 3])
    rows = [[1, 2, 11], [1, 2, 12, 12], [3, 13], [3, 14], [4, 5, 6, 15, 15], [4, 5, 6, 16]]
    ids = torch.tensor([row + [0] * (5 - len(row)) for row in rows])
    data = {"input_ids": ids, "input_lengths": torch.tensor([len(row) for row in rows]), "prompt_lengths": prompts}
    data["sample_mask"] = torch.ones(6)
    found = mismatched_rows(BatchedDataDict(data), pad_id=0)
    expected = [[1, 2, 13], [1, 2, 14], [3, 15, 15], [3, 16], [4, 5, 6, 11], [4, 5, 6, 12, 12]]
    lengths = found["input_lengths"].tolist()
    assert [row[:end] for row, end in zip(found["input_ids"].tolist(), lengths, strict=True)] == expected
    assert found["token_mask"].sum(1).tolist() == [1, 1, 2, 1, 1, 2]
    assert found["token_mask"][5].tolist() == [0, 0, 0, 1, 1]
    with pytest.raises(BatchError, match="at least two pairs"):
        mismatched_rows(BatchedDataDict({name: value[:2] for name, value in data.items()}), pad_id=0)


def test_mismatched_rows_are_no_longer_than_the_batch() -> None:
    ids = torch.tensor([[1, 2, 3, 9], [1, 2, 3, 9], [4, 7, 8, 0], [4, 7, 8, 0]])
    data = {"input_ids": ids, "input_lengths": torch.tensor([4, 4, 3, 3]), "prompt_lengths": torch.tensor([3, 3, 1, 1])}
    found = mismatched_rows(BatchedDataDict({**data, "sample_mask": torch.ones(4)}), pad_id=0)
    assert found["input_ids"].tolist() == [[1, 2, 3, 7], [1, 2, 3, 7], [4, 9, 0, 0], [4, 9, 0, 0]]

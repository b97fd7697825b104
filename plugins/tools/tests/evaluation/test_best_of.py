"""`rlframework generate --best-of`: rows of the best completions, what is not chosen, and errors of the options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from probe_runs import call, rows_of

from rlframework.config.environments import ColumnsConfig
from rlframework.datasets.conversations import conversation_of
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.environment import Sample, StepOutcome
from rlframework_tools.evaluation import best_of
from rlframework_tools.evaluation.best_of import BestOfResult, Candidate, best_row

SAMPLE = Sample("7", ({"role": "user", "content": "3+4="},), "7")


def usable(*rewards: float) -> list[Candidate]:
    return [Candidate(str(number), reward, True) for number, reward in enumerate(rewards)]


def test_the_row_of_the_best_is_a_row_for_supervised_training():
    row = best_row(SAMPLE, usable(0.25, 1.0, 0.5, 1.0), None)
    assert row == {
        "id": "7",
        "prompt": [{"role": "user", "content": "3+4="}],
        "completion": "1",  # the first of the best
        "answer": "7",
        "reward": 1.0,
        "candidates": 4,
    }
    conversation = conversation_of(json.loads(json.dumps(row)), ColumnsConfig(), "row 1")
    assert (conversation.messages, conversation.completion, conversation.answer) == (SAMPLE.messages, "1", "7")


def test_what_cannot_be_trained_on_is_not_chosen():
    best = Candidate("cut", 9.0, False)
    row = best_row(SAMPLE, [best, *usable(-3.0, -2.0)], None)
    assert row is not None
    assert (row["completion"], row["reward"], row["candidates"]) == ("1", -2.0, 3)
    assert best_row(SAMPLE, [best], None) is None
    assert best_row(SAMPLE, usable(0.5), 0.5) is not None  # the threshold is included
    assert best_row(SAMPLE, usable(0.49), 0.5) is None


def test_cut_failed_and_empty_completions_are_not_usable(monkeypatch):
    def scored(parts, samples, seeds):
        assert samples == [SAMPLE] * 4
        outcomes = [StepOutcome(1.0, metrics={"reward_failures": float(failed)}) for failed in (0, 0, 1, 0)]
        return {"truncated": torch.tensor([True, False, False, False])}, ["a", "b", "c", ""], outcomes

    monkeypatch.setattr(best_of, "scored_turns", scored)
    result = BestOfResult()
    found = best_of.candidates_of(None, [SAMPLE], torch.arange(4), result)
    assert [(each.text, each.usable) for each in found] == [("a", False), ("b", True), ("c", False), ("", False)]
    assert (result.completions, result.truncated, result.failures, result.reward) == (4, 1, 1, 4.0)


def test_the_summary():
    result = BestOfResult(prompts=4, rows=2, completions=16, truncated=3, reward=4.0, best_reward=1.5)
    assert str(result) == (
        "2 rows of 4 prompts; mean reward 0.75, of all 16 completions 0.25 (3 were cut at "
        "generation.max_new_tokens; none of these is in a row)"
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--best-of", 2], "give --out FILE.jsonl"),
        (["--best-of", 2, "--out", "old.jsonl"], "old.jsonl exists, and nothing is overwritten"),
        (["--best-of", 2, "--out", "cut.jsonl"], "cut.partial.jsonl exists, and nothing is overwritten"),
        (["--best-of", 2, "--out", "new.jsonl", "--split", "test"], "must be train or validation"),
        (["--best-of", 2, "--out", "new.jsonl", "--min-reward", "nan"], "must be a finite number"),
        (["--best-of", 2, "--out", "new.jsonl", "3+4="], "leave out prompts"),
        (["--min-reward", 1, "3+4="], "are options of --best-of"),
    ],
)
def test_options_that_do_not_fit(words, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("old.jsonl", "cut.partial.jsonl"):
        (tmp_path / name).touch()
    assert call("generate", "model", *words) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "new.jsonl").exists()


# -- with a model -----------------------------------------------------------------------------------------------------

TASK = "environment: {name: addition, digits: 1, validation_samples: 10}\nseed: 3\n"
MODEL = ["--max-new-tokens", 3, "--temperature", 1.0, "--config", "task.yaml"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.yaml").write_text(TASK + "policy: {model_name: none}\nalgorithm: {name: sft}\n")
    return tmp_path


@pytest.mark.slow
def test_the_best_of_a_model(tiny_llama, folder, capsys):
    words = [tiny_llama, "--best-of", 8, *MODEL, "--limit", 12]
    assert call("generate", *words, "--out", "best.jsonl") == 0
    printed = capsys.readouterr().out
    rows = rows_of(folder / "best.jsonl")
    assert f"done: {len(rows)} rows of 12 prompts; mean reward" in printed
    assert [path.name for path in folder.glob("*.jsonl")] == ["best.jsonl"]
    for row in rows:
        assert row["answer"] == str(sum(map(int, row["id"].split("+"))))
        assert row["reward"] == float(row["completion"].strip() == row["answer"])
        assert row["candidates"] == 8
    assert call("generate", *words, "--out", "again.jsonl", "generation.batch_size=9") == 0
    assert rows_of(folder / "again.jsonl") == rows
    assert call("generate", *words, "--out", "other.jsonl", "--seed", 4) == 0
    assert rows_of(folder / "other.jsonl") != rows


@pytest.mark.slow
def test_a_prompt_is_left_out_where_no_completion_is_good_enough(folder, capsys):
    """Of a random model over 14 tokens, about one completion in 200 is a given digit and the end."""
    model = make_llama(folder / "model", character_tokenizer("0123456789+="), hidden=16, layers=1, heads=2)
    words = [model, "--best-of", 64, *MODEL, "--min-reward", 1]
    assert call("generate", *words, "--out", "best.jsonl") == 0
    rows = rows_of(folder / "best.jsonl")
    assert 0 < len(rows) < 90
    assert {row["reward"] for row in rows} == {1.0}
    assert {row["completion"].strip() == row["answer"] for row in rows} == {True}
    assert call("generate", model, "--best-of", 2, *MODEL, "--min-reward", 2, "--out", "none.jsonl") == 2
    assert "a reward of at least --min-reward 2" in capsys.readouterr().err
    assert [path.name for path in folder.glob("*.jsonl")] == ["best.jsonl"]

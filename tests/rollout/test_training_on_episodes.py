"""GRPO, validation and evaluation on episodes of two turns, with the embedded engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from probe_runs import assert_same_weights, call, numbers_of

from rlframework import run
from rlframework.runner.launch import resume

pytestmark = pytest.mark.slow

STOPS = ["generation.max_new_tokens=6", "generation.stop_token_ids=[8, 9, 10, 11, 12, 13]"]
GAME = [*STOPS, 'plugins=["probe_games"]', "~environment", "environment={name: two_turns, max_episode_tokens: 24}"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [[], ["worker_group={name: processes, num_workers: 2}"]], ids=["inline", "two"])
def test_grpo_learns_a_game_of_two_turns(run_config: Any, tmp_path: Path, workers: list[str]) -> None:
    steps = ["algorithm.num_steps=12", "policy.optimizer.lr=5e-3", "algorithm.validation.every=0"]
    result = run(run_config("grpo", *GAME, *steps, *workers))
    rewards = [row["train/reward"] for row in result.history if "train/reward" in row]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3
    row = result.history[-1]
    parts = row["train/reward/first"], row["train/reward/second"]
    assert row["train/failed_episodes"] == 0.0
    assert row["train/episode_rows"] == 1.0
    assert 1.5 < row["train/episode_turns"] <= 2.0
    assert row["train/truncated_fraction"] == pytest.approx(
        sum(value for name, value in row.items() if name.startswith("train/truncated/"))
    )
    assert all(part > 0 for part in parts)
    assert row["train/generation_logprob_difference_max"] < 1e-4  # the row that is trained is what was sampled
    assert {"validation/episode_turns", "validation/reward"} <= result.history[0].keys() | result.metrics.keys()
    sample = lines(tmp_path / "run" / "samples.jsonl")[-1]
    assert [turn["role"] for turn in sample["turns"]][:2] == ["user", "assistant"]
    assert sample["model_input"] == sample["prompt"] == f"{sample['sample']}?"
    assert sample["metrics"].keys() == {"first", "second"}


def test_a_warning_names_the_limits_that_cut_most_episodes(
    run_config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Most turns of six tokens end with a stop token, and episodes have one turn of the two: the largest is first."""
    run(run_config("grpo", *GAME, "environment.max_turns=1", "algorithm.num_steps=1"))
    row = lines(tmp_path / "run" / "metrics.jsonl")[-1]
    parts = [row[f"train/truncated/{name}"] for name in ("max_turns", "max_new_tokens")]
    assert parts[0] > parts[1] > 0
    percent = [f"{100 * part:.0f}%" for part in parts]
    reached = f"{percent[0]} at environment.max_turns, {percent[1]} at generation.max_new_tokens"
    assert caplog.text.count(f"step 1: 100% of the episodes were truncated: {reached}. They are") == 1


def test_a_resumed_run_has_the_same_episodes(run_config: Any, tmp_path: Path) -> None:
    """Bit by bit, as the engine waits for all episodes before it decodes their next turns together."""

    def config(folder: str, *more: str) -> Any:
        keys = ["checkpoints.every=2", "algorithm.num_steps=6", f"output_dir={tmp_path / folder}", *more]
        return run_config("grpo", *GAME, "environment.fails=3", "environment.gather_timeout=20", *keys)

    run(config("whole"))
    run(config("two", "algorithm.num_steps=4"))
    resume(tmp_path / "two", ["algorithm.num_steps=6"])
    whole, two = (numbers_of(tmp_path / folder) for folder in ("whole", "two"))
    del two[4], whole[4]  # the last step of the shorter run has a validation that the other has not
    assert whole == two
    assert any(row.get("train/failed_episodes") for row in whole.values())
    assert_same_weights(tmp_path / "whole", tmp_path / "two")


def test_a_model_is_evaluated_in_episodes(run_config: Any, tmp_path: Path) -> None:
    run(run_config("grpo", *GAME, "algorithm.num_steps=1"))
    out = tmp_path / "evaluation"
    assert call("evaluate", tmp_path / "run", "--samples", 4, "--attempts", 2, "--out", out, "--trust-run") == 0
    rows = lines(out / "completions.jsonl")
    assert [(row["id"], row["attempt"]) for row in rows] == [(str(n), k) for n in range(40, 44) for k in (0, 1)]
    for row in rows:
        turns = [turn for turn in row["turns"] if turn["role"] == "assistant"]
        assert row["reward"] == pytest.approx(sum(turn["reward"] for turn in turns), abs=1e-5)
        assert turns[-1]["content"] == row["completion"]
        assert row["turns"][0] == {"role": "user", "content": f"{row['id']}?", "trained": False}


def test_failed_episodes_of_an_evaluation_are_counted(
    run_config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(run_config("grpo", *GAME, "algorithm.num_steps=1"))
    out = tmp_path / "evaluation"
    fails = "environment.fails=1"
    assert call("evaluate", tmp_path / "run", fails, "--samples", 8, "--attempts", 4, "--out", out, "--trust-run") == 0
    failed = [row for row in lines(out / "completions.jsonl") if "failure" in row]
    assert 0 < len(failed) < 32
    (found,) = {(row["reward"], row["accuracy"], row["failure"]) for row in failed}
    assert found[:2] == (0.0, 0.0)
    assert found[2].startswith("RuntimeError in step, turn 2: lost (")
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["failed_episodes"], summary["reward_failures"]) == (len(failed), 0)
    assert f"{len(failed)} episodes of " in " ".join(capsys.readouterr().out.split())

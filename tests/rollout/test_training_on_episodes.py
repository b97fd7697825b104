"""GRPO and evaluation on episodes of two turns, also with a template that rewrites history: several rows an episode."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_runs import call
from transformers import AutoModelForCausalLM

from rlframework import run
from rlframework.generation.completions import Completions
from rlframework.huggingface.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

STOPS = ["generation.max_new_tokens=6", "generation.stop_token_ids=[8, 9, 10, 11, 12, 13]"]
GAME = [*STOPS, 'plugins=["probe_games"]', "~environment", "environment={name: two_turns, max_episode_tokens: 24}"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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


def test_a_model_is_evaluated_in_episodes_of_which_some_fail(
    run_config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(run_config("grpo", *GAME, "algorithm.num_steps=1"))
    out, fails = tmp_path / "evaluation", "environment.fails=1"
    assert call("evaluate", tmp_path / "run", fails, "--samples", 8, "--attempts", 4, "--out", out, "--trust-run") == 0
    rows = lines(out / "completions.jsonl")
    assert [(row["id"], row["attempt"]) for row in rows] == [(str(n), k) for n in range(40, 48) for k in range(4)]
    for row in [row for row in rows if "failure" not in row]:
        turns = [turn for turn in row["turns"] if turn["role"] == "assistant"]
        assert row["reward"] == pytest.approx(sum(turn["reward"] for turn in turns), abs=1e-5)
        assert turns[-1]["content"] == row["completion"]
        assert row["turns"][0] == {"role": "user", "content": f"{row['id']}?", "trained": False}
    failed = [row for row in rows if "failure" in row]
    assert 0 < len(failed) < 32
    (found,) = {(row["reward"], row["accuracy"], row["failure"]) for row in failed}
    assert found[:2] == (0.0, 0.0)
    assert found[2].startswith("RuntimeError in step, turn 2: lost (")
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["failed_episodes"], summary["reward_failures"]) == (len(failed), 0)
    assert f"{len(failed)} episodes of " in " ".join(capsys.readouterr().out.split())


TEMPLATE = "{% for m in messages %}{{ '-' if m.role == 'assistant' else m.content }}{% endfor %}"
"""Earlier turns of the model are rendered as a dash."""
EPISODES, GROUP = 16, 8
KEYS = [
    "generation.max_new_tokens=6", "generation.stop_token_ids=[8, 9, 10, 11, 12, 13]", 'plugins=["probe_games"]',
    "~environment",
    f"environment={{name: two_turns, max_episode_tokens: 24, max_concurrent_episodes: {EPISODES}}}",
    f"policy.chat_template={TEMPLATE!r}",
    "algorithm.prompts_per_step=2", f"algorithm.samples_per_prompt={GROUP}", "algorithm.num_steps=1",
    "algorithm.validation.every=0", "algorithm.validation.at_start=false", "algorithm.validation.at_end=false",
    "policy.optimizer.weight_decay=0.0",
]  # fmt: skip


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[list[int], list[int]]]]:
    """The prompts of each session with the tokens that the engine returned, as they occur."""
    found: dict[str, list[tuple[list[int], list[int]]]] = {}
    complete, session = Completions.complete, Completions.session

    def begun(self: Completions) -> str:
        name = session(self)
        found[name] = []
        return name

    async def recorded(self: Completions, prompt: Any, seed: int, most: int, session_id: str, *rest: Any) -> Any:
        result = await complete(self, prompt, seed, most, session_id, *rest)
        found[session_id].append((torch.as_tensor(prompt).tolist(), result.token_ids.tolist()))
        return result

    monkeypatch.setattr(Completions, "session", begun)
    monkeypatch.setattr(Completions, "complete", recorded)
    return found


def digits(tokenizer: Any, ids: list[int]) -> float:
    """The reward of a turn: the fraction of digits in its text."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return sum(letter.isdigit() for letter in text) / len(text) if text else 0.0


def test_the_rows_of_an_episode_are_one_step_of_grpo(run_config: Any, turns: Any) -> None:
    config = run_config("grpo", *KEYS, "algorithm.loss.level=sequence")
    row = run(config).history[-1]
    tokenizer = load_tokenizer(config.policy.model_name)
    episodes = list(filter(None, turns.values()))  # in order, as all begin at once
    assert len(episodes) == EPISODES
    assert {len(played) for played in episodes} == {1, 2}
    assert all(later[0][: len(first[0] + first[1])] != first[0] + first[1] for first, later in filter(both, episodes))
    rows = sum(map(len, episodes))
    assert row["train/episode_rows"] == pytest.approx(rows / EPISODES)
    assert row["train/template_breaks"] == pytest.approx(100 * (rows - EPISODES) / rows)

    samples = [json.loads(line) for line in (config.output_dir / "samples.jsonl").read_text().splitlines()]
    marks = [[turn.get("row") for turn in sample["turns"] if turn.get("sampled")] for sample in samples]
    assert [None, 2] in marks
    assert all(each in ([None], [None, 2]) for each in marks)

    rewards = [sum(digits(tokenizer, ids) for _, ids in played) for played in episodes]
    assert row["train/reward"] == pytest.approx(sum(rewards) / EPISODES, abs=1e-6)
    groups = [rewards[start : start + GROUP] for start in range(0, EPISODES, GROUP)]
    advantages = [
        (reward - statistics.mean(group)) / (statistics.stdev(group) + 1e-6) for group in groups for reward in group
    ]
    loss, norm = by_hand(config.policy.model_name, episodes, advantages)
    assert row["train/loss"] == pytest.approx(loss, abs=1e-5)
    assert row["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def both(played: list[Any]) -> bool:
    return len(played) == 2


def by_hand(path: str, episodes: list[Any], advantages: list[float]) -> tuple[float, float]:
    """The loss and its gradient's norm, with a forward for each turn: each has a row of its own."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    loss, value = torch.zeros(()), 0.0
    for played, advantage in zip(episodes, advantages, strict=True):
        weight = 1 / sum(len(ids) for _, ids in played) / len(episodes)
        for prompt, ids in played:
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            loss = loss - weight * advantage * logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum()
            value -= weight * advantage * len(ids)  # the ratio is 1
    loss.backward()
    squares = [float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None]
    return value, sum(squares) ** 0.5

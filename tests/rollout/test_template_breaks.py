"""A chat template that rewrites history: several rows per episode, through the manager into GRPO's optimizer step."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlframework import run
from rlframework.generation.completions import Completions
from rlframework.huggingface.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_rows_of_an_episode_are_one_step_of_grpo(run_config: Any, turns: Any, level: str) -> None:
    config = run_config("grpo", *KEYS, f"algorithm.loss.level={level}")
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
    loss, norm = by_hand(config.policy.model_name, episodes, advantages, level)
    assert row["train/loss"] == pytest.approx(loss, abs=1e-5)
    assert row["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def both(played: list[Any]) -> bool:
    return len(played) == 2


def by_hand(path: str, episodes: list[Any], advantages: list[float], level: str) -> tuple[float, float]:
    """The loss and its gradient's norm, with a forward for each turn: each has a row of its own."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens = sum(len(ids) for played in episodes for _, ids in played)
    loss, value = torch.zeros(()), 0.0
    for played, advantage in zip(episodes, advantages, strict=True):
        own = sum(len(ids) for _, ids in played)
        weight = 1 / tokens if level == "token" else 1 / own / len(episodes)
        for prompt, ids in played:
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            loss = loss - weight * advantage * logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum()
            value -= weight * advantage * len(ids)  # the ratio is 1
    loss.backward()
    squares = [float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None]
    return value, sum(squares) ** 0.5

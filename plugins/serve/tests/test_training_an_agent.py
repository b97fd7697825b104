"""GRPO trains a tiny model to call the tool of an agent by openai-agents."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from probe_agents import CALLED
from probe_runs import rows_of, weights
from safetensors.torch import load_file
from scripted_episodes import ScriptedEngine

from rlframework import run
from rlframework.generation.driver import Generation
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.environment import Sample
from rlframework.rollout.result import Rollout
from rlframework.rollout.step_rollouts import rollout
from rlframework_serve.agent_environment import AgentEnvironment

SUMS = [(a, b) for a in range(1, 4) for b in range(1, 4)]
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"


def call(a: int, b: int) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


def played(config: Any, tokenizer: Any, first: list[str]) -> Rollout:
    """The rollout of the agent where the model says `first[i]` to the i-th of `SUMS`, and then the tool's result."""
    samples = [Sample(f"{a}+{b}=", ({"role": "user", "content": f"{a}+{b}="},), str(a + b)) for a, b in SUMS]
    said = {sample.id: text for sample, text in zip(samples, first, strict=True)}

    def answer(request: Any) -> list[int]:
        prompt = tokenizer.decode(request.prompt_ids)
        asked = re.findall(r"\d\+\d=", prompt)[-1]
        result = re.findall(r"<tool_response>\s*(\d)\s*</tool_response>", prompt.split(asked)[-1])
        text = result[0] if result else said[asked]
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    policy: Any = SimpleNamespace(config=config)
    generation = Generation(policy, tokenizer, [ScriptedEngine(answer)])
    generation.finish_generation = lambda: True  # type: ignore[method-assign]
    environment = AgentEnvironment(config.environment, seed=0)
    parts: Any = SimpleNamespace(
        config=config, tokenizer=tokenizer, generation=generation, environment=environment, models={}, images=None
    )
    return rollout(parts, samples, torch.arange(len(samples)))


def short_tokenizer(text: str) -> Any:
    """Byte pairs of up to six characters of `text`, with digits on their own, so that sequences are short."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=500, max_token_length=6, special_tokens=["<pad>", "<eos>"], initial_alphabet=list(ALPHABET),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def warm_start(path: Path, rows: list[tuple[torch.Tensor, torch.Tensor]], steps: int) -> None:
    """Train the model at `path` on `rows` (tokens and mask, [T] each), which the agent's rollouts have made."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    most = max(len(ids) for ids, _ in rows)
    ids = torch.stack([torch.nn.functional.pad(ids, (0, most - len(ids))) for ids, _ in rows])
    mask = torch.stack([torch.nn.functional.pad(mask, (0, most - len(mask))) for _, mask in rows])
    labels = torch.where(mask, ids, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    order = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randperm(len(rows), generator=order)[:16]
        loss = model(input_ids=ids[chosen], labels=labels[chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(path)


@pytest.fixture
def warm(run_config: Any, tmp_path: Path) -> Any:
    """`warm(*overrides)`: the configuration of a run from a model that calls the tool about as often as it guesses."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in SUMS))
    environment = f"environment={{name: agent, agent: 'probe_agents:adds', path: {path}}}"
    model = tmp_path / "model"

    def config(*overrides: str) -> Any:
        keys = ["~environment", environment, f"policy.model_name={model}", "policy.batching.tokens=4096"]
        return run_config("grpo", *keys, "generation.max_new_tokens=40", "algorithm.validation.every=0", *overrides)

    calls = [call(a, b) for a, b in SUMS]
    plain = character_tokenizer(ALPHABET)
    make_llama(model, plain, hidden=32, layers=1, max_positions=2000)
    rollout_of_text = played(config("generation.max_new_tokens=100"), plain, calls)
    assert rollout_of_text.rewards.tolist() == [1.0] * len(SUMS)
    tokenizer = short_tokenizer(plain.decode(rollout_of_text.data["input_ids"][0]))
    make_llama(model, tokenizer, hidden=64, layers=2, heads=4, max_positions=600)
    rows = []
    for first in (calls, [str(1 + (a * b) % 9) for a, b in SUMS]):
        data = played(config(), tokenizer, first).data
        for ids, mask, length in zip(data["input_ids"], data["token_mask"], data["input_lengths"], strict=True):
            rows.append((ids[:length], mask[:length].bool()))
    for (a, b), (ids, mask) in zip(SUMS, rows, strict=False):  # trained: the call and the answer, not the tool's result
        assert tokenizer.decode(ids[mask]) == f"{call(a, b)}<eos>{a + b}<eos>"
    warm_start(model, rows, 250)
    return config


def earned(turns: list[dict[str, Any]]) -> float:
    """The reward of a conversation, from its turns alone."""
    if [turn["role"] for turn in turns] != ["user", "assistant", "tool", "assistant"]:
        return 0.0
    a, b = map(int, turns[0]["content"].rstrip("=").split("+"))
    (said,) = turns[1]["tool_calls"]
    right = (said["function"]["name"], json.loads(said["function"]["arguments"])) == ("add", {"a": a, "b": b})
    return float(right and turns[3]["content"] == str(a + b))


@pytest.mark.thorough
@pytest.mark.slow
def test_grpo_trains_a_model_to_call_the_tool_of_an_agent(warm: Any, tmp_path: Path) -> None:
    CALLED.clear()
    config = warm("algorithm.num_steps=8", "policy.optimizer.lr=3e-4", "observers.samples=32")
    before = load_file(tmp_path / "model" / "model.safetensors")
    history = [row for row in run(config).history if "train/reward" in row]
    rewards = [row["train/reward"] for row in history]
    samples = [
        row for row in rows_of(tmp_path / "run" / "samples.jsonl") if 0 < row["step"] < 8
    ]  # the last has a validation too
    assert len(samples) == 7 * 32
    assert [row["reward"] for row in samples] == [earned(row["turns"]) for row in samples]
    trained = [turn for row in samples for turn in row["turns"] if turn["trained"]]
    assert {turn["role"] for turn in trained} == {"assistant"}
    assert len(CALLED) >= sum(row["reward"] for row in samples) > 0  # the tool was called for each
    assert all(row["train/generation_logprob_difference_max"] < 1e-4 for row in history)  # trained as it was sampled
    assert all((row["train/failed_episodes"], row["train/episode_rows"]) == (0.0, 1.0) for row in history)
    assert any(not torch.equal(weight, before[name]) for name, weight in weights(tmp_path / "run").items())
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2

"""Speed of rollouts of several turns on the embedded engine, compared with single turns that sample the same tokens.

    python benchmarks/episodes.py [--hidden 256] [--layers 4] [--episodes 32] [--turns 4] [--rounds 9] [--json F]

A random Llama on a CPU, one thread, fp32; turns end at one of nine stop tokens, after 11 tokens on average, each
followed by an observation of 8 tokens. `episodes`: the rollout manager with an environment that answers at once.
`single turns`: for
each turn, one batch through `Generation.generate` with the prompts and seeds of that turn, and nothing else: no
environment, no rendering, no training rows. `single, kept`: the same, with the prefixes of earlier turns kept by the
engine, as episodes have them: the cost of the manager itself. Before it measures, it checks that all three sample the
same tokens.

Interleaved rounds, CPU time of the process for each sampled token; below 1 the first is faster.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from interleave import interleave, machine, write_json

LETTERS = "".join(chr(letter) for letter in range(33, 127))
OBSERVATION = "observed"
END = 1


def environment_of(turns: int) -> Any:
    """Return an environment whose episodes have `turns` turns."""
    from rlframework.interfaces.environment import Environment, Episode, Sample, StepOutcome

    class Talk(Episode):
        def __init__(self, sample: Sample) -> None:
            self.sample, self.left = sample, turns

        async def reset(self) -> Any:
            return self.sample.messages

        async def step(self, message: Any) -> StepOutcome:
            self.left -= 1
            return StepOutcome(0.0, not self.left, ({"role": "user", "content": OBSERVATION},))

    class Talks(Environment):
        def __init__(self) -> None:
            return

        def samples(self, split: Any) -> Any:
            return ()

        def episode(self, sample: Sample, seed: int) -> Episode:
            return Talk(sample)

    return Talks()


def parts_of(folder: Path, given: argparse.Namespace) -> Any:
    """Return the parts of a run that a rollout needs."""
    from rlframework import load_config
    from rlframework.generation.driver import Generation
    from rlframework.huggingface.model_directories import make_llama
    from rlframework.huggingface.tokenizer import character_tokenizer
    from rlframework.plugins.manager import create_manager
    from rlframework.policy.client import Policy

    tokenizer = character_tokenizer(LETTERS)
    model = make_llama(
        folder / "model", tokenizer, hidden=given.hidden, layers=given.layers, heads=8, kv_heads=4, max_positions=1024
    )
    values = {
        "output_dir": str(folder / "run"),
        "device": "cpu",
        "algorithm": {"name": "grpo"},
        "environment": {"name": "addition", "max_turns": given.turns, "max_episode_tokens": 1024},
        "policy": {"model_name": str(model), "precision": "float32"},
        "generation": {"max_new_tokens": 128, "stop_token_ids": list(range(2, 10)), "batch_size": given.episodes},
    }
    config = load_config(values)
    policy = Policy(config, tokenizer, create_manager(), init_optimizer=False)
    return SimpleNamespace(
        config=config,
        tokenizer=tokenizer,
        policy=policy,
        generation=Generation(policy, tokenizer),
        environment=environment_of(given.turns),
    )


Turns = list[list[tuple[Any, int]]]
"""Of each turn, the prompt and seed of each episode that has it."""


def turns_of(result: Any, seeds: list[int], given: argparse.Namespace) -> tuple[Turns, list[list[list[int]]]]:
    """Return prompts and seeds of each turn, and what was sampled, as lists of turns."""
    from rlframework.rollout.seeds import turn_seed

    prompts: Turns = [[] for _ in range(given.turns)]
    sampled: list[list[list[int]]] = [[] for _ in range(given.turns)]
    rows = zip(result.data["input_ids"], result.data["token_mask"], result.data["input_lengths"].tolist(), strict=True)
    for (ids, mask, length), seed in zip(rows, seeds, strict=True):
        edges = (mask[:length].diff(prepend=mask[:1] * 0, append=mask[:1] * 0) != 0).nonzero().flatten().tolist()
        for turn, (start, end) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
            prompts[turn].append((ids[:start], turn_seed(seed, turn)))
            sampled[turn].append(ids[start:end].tolist())
    return prompts, sampled


def single_turns(parts: Any, turns: Turns) -> list[list[list[int]]]:
    """Sample each turn as one batch."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from rlframework.batch.batched_data_dict import BatchedDataDict

    sampled = []
    for turn in turns:
        data: Any = BatchedDataDict(
            {
                "input_ids": pad_sequence([prompt for prompt, _ in turn], batch_first=True),
                "input_lengths": torch.tensor([len(prompt) for prompt, _ in turn]),
                "seeds": torch.tensor([seed for _, seed in turn]),
            }
        )
        output = parts.generation.generate(data)
        ends = zip(output["unpadded_sequence_lengths"].tolist(), output["generation_lengths"].tolist(), strict=True)
        sampled.append([row[end - n : end] for row, (end, n) in zip(output["output_ids"].tolist(), ends, strict=True)])
    return sampled


def kept_turns(parts: Any, turns: Turns) -> list[list[list[int]]]:
    """Sample each turn as one batch of requests with sessions."""
    from rlframework.generation.driver import run_in_loop
    from rlframework.rollout.episode_thread import gather_or_cancel

    async def sample() -> list[list[list[int]]]:
        async with parts.generation.completions() as completions:
            sessions = [completions.session() for _ in turns[0]]
            limit = parts.config.generation.max_new_tokens
            sampled = []
            for turn in turns:
                results = await gather_or_cancel(
                    [
                        completions.complete(prompt, seed, limit, session)
                        for (prompt, seed), session in zip(turn, sessions, strict=True)
                    ]
                )
                sampled.append([result.token_ids.tolist() for result in results])
            return sampled

    return run_in_loop(sample())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 256), ("layers", 4), ("episodes", 32), ("turns", 4), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    from rlframework.interfaces.environment import Sample
    from rlframework.rollout.step_rollouts import rollout

    with tempfile.TemporaryDirectory() as folder:
        parts = parts_of(Path(folder), given)
        letters = torch.randint(0, len(LETTERS), (given.episodes, 24), generator=torch.Generator().manual_seed(1))
        texts = ["".join(LETTERS[index] for index in row) for row in letters.tolist()]
        samples = [Sample(str(n), ({"role": "user", "content": text},), "") for n, text in enumerate(texts)]
        seeds = torch.arange(given.episodes) + 1000
        parts.policy.prepare_for_lp_inference()
        result = rollout(parts, samples, seeds)
        turns, sampled = turns_of(result, seeds.tolist(), given)
        tokens = sum(len(row) for turn in sampled for row in turn)
        assert tokens == int(result.completion_lengths.sum())
        assert single_turns(parts, turns) == sampled, "single turns sample other tokens"
        print(f"{tokens} tokens in {sum(map(len, turns))} turns of {given.episodes} episodes, the same on all sides")
        assert all(len(turn) == given.episodes for turn in turns), "an episode was truncated"
        contenders: dict[str, Any] = {
            "episodes": lambda: float(rollout(parts, samples, seeds).completion_lengths.sum()),
            "single turns": lambda: float(sum(len(row) for turn in single_turns(parts, turns) for row in turn)),
        }
        assert kept_turns(parts, turns) == sampled, "kept prefixes give other tokens"
        contenders["single, kept"] = lambda: float(sum(len(row) for turn in kept_turns(parts, turns) for row in turn))
        timings = interleave(contenders, given.rounds)
        parts.policy.shutdown()
    others = list(contenders)[1:]
    for name in contenders:
        print(f"{name}: {timings.rate(name):,.0f} tokens per CPU second")
    for name in others:
        ratio = timings.ratio("episodes", name)
        print(f"episodes against {name}: CPU time per token {ratio}; speed {1 / ratio.median:.2f}")
    if given.json:
        write_json(given.json, {"machine": machine(), "seconds": timings.seconds, "tokens": timings.units})


if __name__ == "__main__":
    main()

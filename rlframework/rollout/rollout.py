"""Rollouts: prompts to the generation engine, completions to the environment, and what came of it as tensors.

Single turn: an environment that wants to go on after the first answer is refused until the multi-turn loop is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.datasets.collate import pad_rows
from rlframework.datasets.rendering import render_prompt
from rlframework.errors import NotSupported
from rlframework.interfaces.environment import Message
from rlframework.plugins.hookspec import SampleRecord

if TYPE_CHECKING:
    from rlframework.algorithm import Parts
    from rlframework.interfaces.environment import Sample, StepOutcome


@dataclass
class Rollout:
    """Completions of B samples and what they are worth.

    `data`: `input_ids [B, T]`, `input_lengths [B]`, `token_mask [B, T]` (1 on completions), `sample_mask [B]`,
    `generation_logprobs [B, T]`. `rewards [B]`, `accuracies [B]` fp32, `completion_lengths [B]`, `truncated [B]` bool.
    `metrics`: what the outcomes tell besides, see `outcome_metrics`.
    """

    samples: Sequence[Sample]
    completions: list[str]
    data: BatchedDataDict[Any]
    rewards: Tensor
    accuracies: Tensor
    completion_lengths: Tensor
    truncated: Tensor
    metrics: dict[str, float] = field(default_factory=dict)

    def records(self, step: int, kind: Literal["train", "validation"], count: int) -> list[SampleRecord]:
        """At most `count` of them, evenly spread, to look at."""
        rows = range(0, len(self.samples), max(1, -(-len(self.samples) // count))) if count else ()
        return [
            SampleRecord(
                step=step,
                kind=kind,
                prompt=self.samples[row].messages[-1]["content"],
                completion=self.completions[row],
                reward=float(self.rewards[row]),
            )
            for row in rows
        ]


def row_seeds(seed: int, step: int, rows: int) -> Tensor:
    """`[rows]` int64 seeds, different for each row and step, the same however the rows are spread over workers."""
    # not torch's generator: on the CPU it reads only the lower 32 bits of its seed
    return torch.from_numpy(np.random.default_rng([seed, step]).integers(0, 2**62, rows))


def rollout(parts: Parts, samples: Sequence[Sample], seeds: Tensor, *, greedy: bool = False) -> Rollout:
    """One completion for each of `samples`, judged by the environment."""
    output, prompt_lengths = _generate(parts, samples, seeds, greedy)
    lengths = output["unpadded_sequence_lengths"]
    columns = torch.arange(output["output_ids"].shape[1])
    completion_mask = (columns >= prompt_lengths[:, None]) & (columns < lengths[:, None])
    completions = _texts(parts, output["output_ids"], prompt_lengths, lengths)
    rewards, accuracies, metrics = _judge(parts, samples, completions)
    data: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": output["output_ids"],
            "input_lengths": lengths,
            "token_mask": completion_mask.float(),
            "sample_mask": torch.ones(len(samples)),
            "generation_logprobs": output["logprobs"],
        }
    )
    lengths, truncated = output["generation_lengths"], output["truncated"]
    return Rollout(samples, completions, data, rewards, accuracies, lengths, truncated, metrics)


def _generate(
    parts: Parts, samples: Sequence[Sample], seeds: Tensor, greedy: bool
) -> tuple[BatchedDataDict[Any], Tensor]:
    prompts = [render_prompt(parts.tokenizer, sample.messages) for sample in samples]
    input_ids, lengths = pad_rows(prompts, parts.tokenizer.pad_token_id)
    prompt_data: BatchedDataDict[Any] = BatchedDataDict(
        {"input_ids": input_ids, "input_lengths": lengths, "seeds": seeds}
    )
    parts.generation.prepare_for_generation()
    output = parts.generation.generate(prompt_data, greedy=greedy)
    parts.generation.finish_generation()  # not after a failure: an error of its own would hide what went wrong
    return output, lengths


def _texts(parts: Parts, output_ids: Tensor, starts: Tensor, ends: Tensor) -> list[str]:
    ids = [row[start:end] for row, start, end in zip(output_ids.tolist(), starts.tolist(), ends.tolist(), strict=True)]
    texts: list[str] = parts.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return texts


def _judge(
    parts: Parts, samples: Sequence[Sample], completions: Sequence[str]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Rewards and accuracies `[B]`, and the other metrics.

    An outcome without an `accuracy` metric is right when its reward is 1 or more.
    """
    conversations = [
        [*sample.messages, Message(role="assistant", content=completion)]
        for sample, completion in zip(samples, completions, strict=True)
    ]
    outcomes = parts.environment.step(samples, conversations)
    if not all(outcome.done for outcome in outcomes):
        raise NotSupported(
            f"environment {parts.config.environment.name!r} wants several turns, which rollouts do not do yet; "
            "return done=True with the first outcome"
        )
    rewards = torch.tensor([float(outcome.reward) for outcome in outcomes])
    right = [float(outcome.metrics.get("accuracy", outcome.reward >= 1.0)) for outcome in outcomes]
    return rewards, torch.tensor(right), outcome_metrics(outcomes)


def outcome_metrics(outcomes: Sequence[StepOutcome]) -> dict[str, float]:
    """What `outcomes` tell besides reward and accuracy, by metric name.

    `reward_failures` is a number of outcomes; any other is `reward/NAME`, the mean over the outcomes that have it.
    """
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, value in outcome.metrics.items():
            found.setdefault(name, []).append(float(value))
    found.pop("accuracy", None)
    failures = {"reward_failures": sum(found.pop("reward_failures"))} if "reward_failures" in found else {}
    return failures | {f"reward/{name}": sum(values) / len(values) for name, values in found.items()}


def validate(parts: Parts, step: int) -> tuple[dict[str, float], list[SampleRecord]]:
    """Greedy answers to the first held-out samples: their metrics, and some of them to look at."""
    count = parts.config.algorithm.validation.samples
    samples = parts.environment.samples("validation")[:count]
    result = rollout(parts, samples, row_seeds(parts.config.seed, step, len(samples)), greedy=True)
    metrics = {
        "validation/accuracy": float(result.accuracies.mean()),
        "validation/reward": float(result.rewards.mean()),
        "validation/completion_length": float(result.completion_lengths.float().mean()),
        "validation/truncated_fraction": float(result.truncated.float().mean()),
        "validation/samples": float(len(samples)),
    } | {f"validation/{name}": value for name, value in result.metrics.items()}
    return metrics, result.records(step, "validation", parts.config.observers.samples)

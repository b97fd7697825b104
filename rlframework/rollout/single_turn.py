"""Single-turn rollouts: generate completions of prompts, score them in the environment, return both as tensors.

Does not support environments that continue after the first answer: they raise `NotSupported`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.datasets.rendering import render_prompt
from rlframework.datasets.tokens import pad_rows
from rlframework.errors import NotSupported, UserError
from rlframework.interfaces.environment import LARGEST_REWARD
from rlframework.interfaces.messages import Message, text_of
from rlframework.plugins.hookspec import SampleRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.algorithm import Parts
    from rlframework.generation.driver import Generation
    from rlframework.interfaces.environment import Sample, StepOutcome


@dataclass
class Rollout:
    """The completions of B samples, with their scores.

    `data` has `input_ids [B, T]`, `input_lengths [B]`, `token_mask [B, T]` (1 on completions), `sample_mask [B]` and
    `generation_logprobs [B, T]`. `rewards [B]` and `accuracies [B]` are fp32; `completion_lengths [B]` counts tokens;
    `truncated [B]` is bool. `metrics` are means over the samples, and those of `outcome_metrics`.
    """

    samples: Sequence[Sample]
    completions: list[str]
    data: BatchedDataDict[Any]
    rewards: Tensor
    accuracies: Tensor
    completion_lengths: Tensor
    truncated: Tensor
    metrics: dict[str, float]

    def records(self, step: int, kind: Literal["train", "validation"], count: int) -> list[SampleRecord]:
        """Return at most `count` of the samples, evenly spaced, for logging."""
        rows = range(0, len(self.samples), -(-len(self.samples) // count)) if count else ()
        return [
            SampleRecord(
                text_of(self.samples[row].messages[-1]), self.completions[row], float(self.rewards[row]), step, kind
            )
            for row in rows
        ]


def row_seeds(seed: int, step: int, rows: int) -> Tensor:
    """Return `[rows]` int64 seeds that differ for each row and step, and do not depend on the number of workers."""
    # not torch's generator, which on the CPU uses only the lower 32 bits of its seed
    return torch.from_numpy(np.random.default_rng([seed, step]).integers(0, 2**62, rows))


def prompt_seeds(seed: int, first: int, prompts: int, each: int) -> Tensor:
    """Return `[prompts * each]` int64 seeds for `each` rows of the prompts numbered from `first`.

    They do not depend on the number of prompts, nor on how these are batched.
    """
    return torch.cat([row_seeds(seed, number, each) for number in range(first, first + prompts)])


def complete(
    tokenizer: PreTrainedTokenizerBase,
    generation: Generation,
    prompts: Sequence[Sequence[int]],
    seeds: Tensor,
    *,
    greedy: bool = False,
) -> tuple[BatchedDataDict[Any], list[str]]:
    """Generate a completion of each of `prompts [B]`, given as token ids, with `seeds [B]`.

    Returns the output of `Generation.generate`, and the completions as text.
    """
    input_ids, lengths = pad_rows(prompts, tokenizer.pad_token_id)
    data: BatchedDataDict[Any] = BatchedDataDict({"input_ids": input_ids, "input_lengths": lengths, "seeds": seeds})
    generation.prepare_for_generation()
    output = generation.generate(data, greedy=greedy)
    generation.finish_generation()  # not after a failure, as a second error would hide the first
    ends = output["unpadded_sequence_lengths"].tolist()
    rows = zip(output["output_ids"].tolist(), lengths.tolist(), ends, strict=True)
    return output, tokenizer.batch_decode([row[start:end] for row, start, end in rows], skip_special_tokens=True)


def rollout(parts: Parts, samples: Sequence[Sample], seeds: Tensor, *, greedy: bool = False) -> Rollout:
    """Generate one completion for each of `samples` and score them in the environment.

    An outcome without an `accuracy` metric counts as correct if its reward is at least 1.
    """
    prompts = [render_prompt(parts.tokenizer, sample.messages) for sample in samples]
    output, texts = complete(parts.tokenizer, parts.generation, prompts, seeds, greedy=greedy)
    ends = output["unpadded_sequence_lengths"][:, None]
    columns = torch.arange(output["output_ids"].shape[1])
    completed = (columns >= ends - output["generation_lengths"][:, None]) & (columns < ends)
    conversations = [
        [*sample.messages, Message(role="assistant", content=text)] for sample, text in zip(samples, texts, strict=True)
    ]
    outcomes = parts.environment.step(samples, conversations)
    _require_numbers(outcomes, samples, parts.config.environment.name)
    if not all(outcome.done for outcome in outcomes):
        raise NotSupported(
            f"environment {parts.config.environment.name!r} continues after the first turn, which rollouts do not "
            "support; return done=True with the first outcome"
        )
    data: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": output["output_ids"],
            "input_lengths": output["unpadded_sequence_lengths"],
            "token_mask": completed.float(),
            "sample_mask": torch.ones(len(samples)),
            "generation_logprobs": output["logprobs"],
        }
    )
    rewards = torch.tensor([float(outcome.reward) for outcome in outcomes])
    accuracies = torch.tensor([float(each.metrics.get("accuracy", each.reward >= 1.0)) for each in outcomes])
    lengths, truncated = output["generation_lengths"], output["truncated"]
    means = {"reward": rewards, "accuracy": accuracies, "completion_length": lengths, "truncated_fraction": truncated}
    metrics = {name: float(values.float().mean()) for name, values in means.items()} | outcome_metrics(outcomes)
    return Rollout(samples, texts, data, rewards, accuracies, lengths, truncated, metrics)


def _require_numbers(outcomes: Sequence[StepOutcome], samples: Sequence[Sample], environment: str) -> None:
    """Raise `UserError` for another number of outcomes, and for a reward or metric that is no usable number."""
    if len(outcomes) != len(samples):
        raise UserError(f"environment {environment!r} returned {len(outcomes)} outcomes for {len(samples)} samples")
    for sample, outcome in zip(samples, outcomes, strict=True):
        for name, value in {"reward": outcome.reward, **outcome.metrics}.items():
            if isinstance(value, str) or not _is_usable(value):
                raise UserError(
                    f"environment {environment!r} returned {name}={value!r:.80} for sample {sample.id!r}; it must be a "
                    f"finite number of at most {LARGEST_REWARD:g} in size"
                )


def _is_usable(value: Any) -> bool:
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor with several numbers
        return abs(float(value)) <= LARGEST_REWARD
    return False


def outcome_metrics(outcomes: Sequence[StepOutcome]) -> dict[str, float]:
    """Combine the metrics of `outcomes`, except `accuracy`, by metric name.

    `reward_failures` is summed; every other metric becomes `reward/NAME`, the mean over the outcomes that have it.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for name, value in outcome.metrics.items():
            found[name].append(float(value))
    found.pop("accuracy", None)
    failures = {"reward_failures": sum(found.pop("reward_failures"))} if "reward_failures" in found else {}
    return failures | {f"reward/{name}": sum(values) / len(values) for name, values in found.items()}


def validate(parts: Parts, step: int) -> tuple[dict[str, float], list[SampleRecord]]:
    """Score greedy answers to the first held-out samples; return metrics and some of the samples for logging."""
    count = parts.config.algorithm.validation.samples
    samples = parts.environment.samples("validation")[:count]
    result = rollout(parts, samples, row_seeds(parts.config.seed, step, len(samples)), greedy=True)
    metrics = {f"validation/{name}": value for name, value in result.metrics.items()}
    metrics["validation/samples"] = float(len(samples))
    return metrics, result.records(step, "validation", parts.config.observers.samples)

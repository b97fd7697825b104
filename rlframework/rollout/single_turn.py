"""Single-turn rollouts: generate completions of prompts, score them in the environment, return both as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframework.base.errors import BatchTypeError, NotSupported
from rlframework.batch.batch_rows import is_integral
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.datasets.chat.rendering import render_prompt
from rlframework.datasets.tokens import pad_rows
from rlframework.interfaces.environment import StepOutcome
from rlframework.interfaces.messages import Message, pictures_of
from rlframework.observers.timeline import ENVIRONMENT, timed
from rlframework.rollout.outcomes import outcome_metrics, require_numbers
from rlframework.rollout.result import Rollout, accuracy_of, parts_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.generation.driver import Generation
    from rlframework.interfaces.environment import Sample
    from rlframework.rollout.parts import Parts


NO_MEDIA: Mapping[str, Any] = {}


def complete(
    tokenizer: PreTrainedTokenizerBase,
    generation: Generation,
    prompts: Sequence[Sequence[int]],
    seeds: Tensor,
    *,
    temperature: float | None = None,
    media: Mapping[str, Any] = NO_MEDIA,
) -> tuple[BatchedDataDict[Any], list[str]]:
    """Generate a completion of each of `prompts [B]`, given as token ids, with `seeds [B]` and the columns `media`.

    `temperature`: None for that of the run. Returns the output of `Generation.generate`, and the completions as text.
    """
    _check_prompts(prompts)
    input_ids, lengths = pad_rows(prompts, tokenizer.pad_token_id)
    rows = {"input_ids": input_ids, "input_lengths": lengths, "seeds": seeds}
    data: BatchedDataDict[Any] = BatchedDataDict({**rows, **media})
    generation.prepare_for_generation()
    output = generation.generate(data, temperature=temperature)
    generation.finish_generation()  # not after a failure, as a second error would hide the first
    ends = output["unpadded_sequence_lengths"].tolist()
    spans = zip(output["output_ids"].tolist(), lengths.tolist(), ends, strict=True)
    return output, tokenizer.batch_decode([row[start:end] for row, start, end in spans], skip_special_tokens=True)


def _check_prompts(prompts: Any) -> None:
    """Raise `BatchTypeError` for what cannot be a list of lists of token ids: text, one prompt, a padded tensor."""
    if isinstance(prompts, (str, Tensor)):
        raise _wrong_prompts(f"a {type(prompts).__name__}")
    for row in prompts:
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise _wrong_prompts(f"a {type(prompts).__name__} with {row!r}")
        if set(map(type, row)) - {int} and (wrong := [each for each in row if not _is_id(each)]):
            raise _wrong_prompts(f"{wrong[0]!r} as a token id")


def _is_id(value: Any) -> bool:
    whole = is_integral(value) if isinstance(value, Tensor) else isinstance(value, Integral)
    return whole and not isinstance(value, bool)


def _wrong_prompts(got: str) -> BatchTypeError:
    return BatchTypeError(
        "prompts must be a list with the list of token ids of each prompt, such as [render_prompt(tokenizer, "
        f"messages)]; got {got}"
    )


def training_rows(output: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """Return the training rows of the output of `Generation.generate`, see `Rollout.data`."""
    ends = output["unpadded_sequence_lengths"][:, None]
    columns = torch.arange(output["output_ids"].shape[1])
    completed = (columns >= ends - output["generation_lengths"][:, None]) & (columns < ends)
    return BatchedDataDict(
        {
            "input_ids": output["output_ids"],
            "input_lengths": output["unpadded_sequence_lengths"],
            "token_mask": completed.float(),
            "sample_mask": torch.ones(len(completed)),
            "generation_logprobs": output["logprobs"],
        }
    )


def scored_turns(
    parts: Parts, samples: Sequence[Sample], seeds: Tensor, *, temperature: float | None = None
) -> tuple[BatchedDataDict[Any], list[str], list[StepOutcome]]:
    """Generate one completion for each of `samples` and score them in the environment, with 0 if it has no scores.

    Returns the output of `Generation.generate`, the completions as text, and their outcomes.
    """
    prompts = [render_prompt(parts.tokenizer, sample.messages, images=parts.images) for sample in samples]
    media = NO_MEDIA
    if parts.images is not None:
        media = media_of(parts, samples, pad_rows(prompts, parts.tokenizer.pad_token_id)[0])
    output, texts = complete(parts.tokenizer, parts.generation, prompts, seeds, temperature=temperature, media=media)
    none = [StepOutcome(0.0) for _ in samples]
    return output, texts, score_turns(parts, samples, texts) if parts.environment.scores else none


def score_turns(parts: Parts, samples: Sequence[Sample], texts: Sequence[str]) -> list[StepOutcome]:
    """Return what the environment makes of the completions `texts` of `samples`."""
    name = parts.config.environment.name
    conversations = [
        [*sample.messages, Message(role="assistant", content=text)] for sample, text in zip(samples, texts, strict=True)
    ]
    with timed(parts.timeline, ENVIRONMENT, "score"):
        outcomes = parts.environment.step(samples, conversations)
    require_numbers(outcomes, samples, name)
    if not all(outcome.done for outcome in outcomes):
        raise NotSupported(
            f"environment {name!r} continues after the first turn: return done=True from `step`, or implement "
            "`episode` for conversations of several turns"
        )
    return outcomes


def single_turns(
    parts: Parts, samples: Sequence[Sample], seeds: Tensor, *, temperature: float | None = None
) -> Rollout:
    """Return the completions of `scored_turns` as a `Rollout`; no metric or record has scores if there are none."""
    output, texts, outcomes = scored_turns(parts, samples, seeds, temperature=temperature)
    result = rollout_of_turns(samples, output, texts, outcomes, torch.zeros(len(samples), dtype=torch.bool))
    result.data.update(media_of(parts, samples, result.data["input_ids"]))
    if not parts.environment.scores:
        result.scored = False
        result.metrics = {name: result.metrics[name] for name in ("completion_length", "truncated_fraction")}
    return result


def media_of(parts: Parts, samples: Sequence[Sample], input_ids: Tensor) -> Mapping[str, Any]:
    """Return the columns that a batch of `samples`, with `input_ids [B, S]`, has for their images, if it has any."""
    if parts.images is None:
        return NO_MEDIA
    return parts.images.columns([pictures_of(sample.messages) for sample in samples], input_ids)


def rollout_of_turns(
    samples: Sequence[Sample],
    output: BatchedDataDict[Any],
    texts: list[str],
    outcomes: Sequence[StepOutcome],
    failed: Tensor,
) -> Rollout:
    """Return completions and their outcomes as a `Rollout`; those that have `failed [E]` bool are not trained on.

    `output`: of `Generation.generate`. An outcome without an `accuracy` metric counts as correct if its reward is at
    least 1.
    """
    data = training_rows(output)
    data["sample_mask"] = (~failed).float()
    rewards = torch.tensor([float(outcome.reward) for outcome in outcomes])
    accuracies = torch.tensor([accuracy_of(outcome) for outcome in outcomes])
    lengths, truncated = output["generation_lengths"], output["truncated"]
    means = {"reward": rewards, "accuracy": accuracies, "completion_length": lengths, "truncated_fraction": truncated}
    metrics = {name: float(values[~failed].float().mean()) for name, values in means.items()}
    metrics |= outcome_metrics(outcome for outcome, out in zip(outcomes, failed.tolist(), strict=True) if not out)
    episodes = torch.arange(len(samples))
    parts = [parts_of(outcome) for outcome in outcomes]
    return Rollout(
        samples, texts, data, rewards, accuracies, lengths, truncated, metrics, episodes, failed, parts=parts
    )

"""The result of a rollout: training rows, and what the environment made of each episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlframework.base.errors import RLFrameworkError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.environment import Sample, StepOutcome
from rlframework.interfaces.generation import WeightSpan
from rlframework.interfaces.messages import Message, pictures_of, text_of
from rlframework.plugins.hookspec import SampleRecord
from rlframework.rollout.outcomes import outcome_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.datasets.image_inputs import ImageInputs
    from rlframework.rollout.trajectory import TrainingRow

Limit = Literal["max_new_tokens", "max_turns", "max_episode_tokens", "agent_request"]
LIMITS: dict[Limit, str] = {
    "max_new_tokens": "generation.max_new_tokens",
    "max_turns": "environment.max_turns",
    "max_episode_tokens": "environment.max_episode_tokens or the model's positions",
    "agent_request": "max_tokens of the agent's requests",
}
"""The setting of each limit that can truncate an episode. `truncated/NAME` in metrics is the fraction of each."""


@dataclass
class Rollout:
    """The episodes of E samples, with their scores, and R rows to train on. A single turn is an episode with one row.

    `data` has `input_ids [R, T]`, `input_lengths [R]`, `token_mask [R, T]` (1 on sampled tokens), `sample_mask [R]` (0
    for rows of failed episodes) and `generation_logprobs [R, T]`; `episode_of [R]` int64 is the episode of each row, in
    ascending order. By episode: `completions`, the text of the model's last turn; `rewards [E]` and `accuracies [E]`
    fp32, both 0 if the episode has failed; `completion_lengths [E]`, its sampled tokens; `truncated [E]` bool;
    `failed [E]` bool; and of episodes with several turns `transcripts`, their messages with `reward` and `trained`, and
    `failures`, why they failed or an empty text. `parts`: the metrics of each episode by name, without `accuracy` and
    `reward_failures`. `scored`: whether rewards mean anything. `metrics` are means over the episodes that have not
    failed, and those of `outcome_metrics`. `spans`: of each row, the weights that sampled its tokens, with positions in
    the row; empty if they are of one version.
    """

    samples: Sequence[Sample]
    completions: list[str]
    data: BatchedDataDict[Any]
    rewards: Tensor
    accuracies: Tensor
    completion_lengths: Tensor
    truncated: Tensor
    metrics: dict[str, float]
    episode_of: Tensor
    failed: Tensor
    transcripts: Sequence[Sequence[Mapping[str, Any]]] = ()
    failures: Sequence[str] = ()
    scored: bool = True
    parts: Sequence[Mapping[str, float]] = ()
    spans: Sequence[Sequence[WeightSpan]] = ()

    def sampled_with(self, version: int | None) -> Tensor:
        """Return `[R, T]` bool: the tokens that were sampled with the weights of `version`."""
        sampled = torch.zeros(self.data["input_ids"].shape, dtype=torch.bool)
        for row, spans in enumerate(self.spans):
            for span in spans:
                if span.version == version:
                    sampled[row, span.start : span.end] = True
        return sampled

    def records(
        self,
        step: int,
        kind: Literal["train", "validation"],
        count: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> list[SampleRecord]:
        """Return at most `count` of the samples for logging: evenly spaced, and one that failed if there is any.

        `tokenizer`: decodes what the answer or the first turn continues, and special tokens of the answer or the last
        turn; None: they are left out.
        """
        some = count and self.scored
        rows = list(range(0, len(self.samples), -(-len(self.samples) // count))) if some else []
        if rows and bool(self.failed.any()) and not bool(self.failed[rows].any()):
            rows[-1] = int(self.failed.nonzero()[0])
        return [self._record(row, step, kind, tokenizer) for row in rows]

    def turns(self, row: int, *, training: bool) -> list[dict[str, Any]]:
        """Return the messages of an episode: `trained` if they are in the loss, and those of the model `sampled`."""
        counted = training and bool((self.data["sample_mask"][self.episode_of == row] != 0).any())
        return [
            {**turn, "trained": counted and turn["trained"], **({"sampled": True} if turn["trained"] else {})}
            for turn in self.transcripts[row]
        ]

    def _record(
        self, row: int, step: int, kind: Literal["train", "validation"], tokenizer: PreTrainedTokenizerBase | None
    ) -> SampleRecord:
        sample, completion, reward = self.samples[row], self.completions[row], float(self.rewards[row])
        common: dict[str, Any] = {
            "sample": sample.id,
            "metrics": self.parts[row] if self.parts else {},
            "truncated": bool(self.truncated[row]),
            "model_input": self._model_input(row, tokenizer),
            "model_output": self.model_output(row, tokenizer),
        }
        if not self.transcripts:
            images, asked = pictures_of(sample.messages), text_of(sample.messages[-1])
            return SampleRecord(asked, completion, reward, step, kind, images=images, **common)
        turns = self.turns(row, training=kind == "train")
        first = next((number for number, turn in enumerate(turns) if "sampled" in turn), len(turns))
        prompt = text_of(cast("Message", turns[first - 1])) if first else _asked(sample)
        return SampleRecord(prompt, completion, reward, step, kind, tuple(turns), self.failures[row], **common)

    def _model_input(self, row: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
        """The tokens before the first sampled one of an answer or episode, as text; empty without one."""
        first = int((self.episode_of == row).nonzero()[0])
        sampled = self.data["token_mask"][first].nonzero()
        if tokenizer is None or not len(sampled):
            return ""
        return str(tokenizer.decode(self.data["input_ids"][first, : int(sampled[0])].tolist()))

    def model_output(self, row: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
        """The completion of an episode with its special tokens, if its text hides any; see `with_special_tokens`.

        The text of a turn with tool calls or reasoning always leaves some out, and hides nothing.
        """
        transcript = self.transcripts[row] if self.transcripts else ()
        last: Mapping[str, Any] = next((turn for turn in reversed(transcript) if turn["trained"]), {})
        if tokenizer is None or last.get("tool_calls") or last.get("reasoning_content"):
            return ""
        final = int((self.episode_of == row).nonzero()[-1])
        places = (self.data["token_mask"][final] != 0).nonzero().flatten()
        if not len(places):
            return ""
        gaps = (places.diff() > 1).nonzero().flatten().tolist()  # between turns
        turn = places[gaps[-1] + 1 if gaps else 0 :]
        ended = bool(self.transcripts) or not bool(self.truncated[row])
        return with_special_tokens(tokenizer, self.data["input_ids"][final, turn].tolist(), ended=ended)


def _asked(sample: Sample) -> str:
    """The text of a sample's last message, for an episode without a turn."""
    return text_of(sample.messages[-1]) if sample.messages else ""


@dataclass(frozen=True, eq=False)
class PlayedEpisode:
    """One episode of `sample`, as the manager or an agent has played it.

    `rows`: of its trajectory, none if no turn was sampled. `transcript`: its messages in order; those of the model have
    `trained` True, and `reward`, that of the outcome that followed. `outcomes`: of its steps. `breaks`: rows that began
    because the chat template rewrites earlier turns. `calls`, `malformed`: the model's tool calls, and those of them
    that no tool can take. `limit`: what has truncated the episode; None if nothing did. `failure`: why it is not
    trained on, in one line; empty if it is. `traceback`: of the user's code, if it has raised.
    """

    sample: Sample
    rows: Sequence[TrainingRow]
    transcript: Sequence[Mapping[str, Any]]
    outcomes: Sequence[StepOutcome]
    turns: int = 0
    breaks: int = 0
    calls: int = 0
    malformed: int = 0
    limit: Limit | None = None
    failure: str = ""
    completion: str = ""
    traceback: str = ""

    @property
    def sampled(self) -> int:
        """The number of sampled tokens."""
        return sum(int(row.token_mask.sum()) for row in self.rows)

    @property
    def total(self) -> StepOutcome:
        """The whole episode's outcome: sums of rewards and metrics, and the last `accuracy` if there is one."""
        if self.failure:
            return StepOutcome(0.0, metrics={"accuracy": 0.0})
        metrics = dict[str, float]()
        for outcome in self.outcomes:
            for name, value in outcome.metrics.items():
                metrics[name] = float(value) + (metrics.get(name, 0.0) if name != "accuracy" else 0.0)
        return StepOutcome(sum(float(outcome.reward) for outcome in self.outcomes), metrics=metrics)


def rollout_of(played: Sequence[PlayedEpisode], pad_id: int, images: ImageInputs | None = None) -> Rollout:
    """Return the rollout of `played`, whose episodes have at least one row each: an empty one gets a masked token.

    `images`: makes the columns of the rows' images; None if they have none.
    """
    from rlframework.environments.tool_episodes import is_refusal

    totals = [episode.total for episode in played]
    failed = torch.tensor([bool(episode.failure) for episode in played])
    data, episode_of = _rows(played, pad_id, images)
    data["sample_mask"] = (~failed[episode_of]).float()
    rewards = torch.tensor([float(total.reward) for total in totals])
    accuracies = torch.tensor([accuracy_of(total) for total in totals])
    lengths = torch.tensor([episode.sampled for episode in played])
    limits = [episode.limit for episode in played]
    truncated = torch.tensor([limit is not None for limit in limits])
    means = {
        "reward": rewards,
        "accuracy": accuracies,
        "completion_length": lengths,
        "truncated_fraction": truncated,
        "episode_turns": torch.tensor([episode.turns for episode in played]),
        "episode_rows": torch.bincount(episode_of, minlength=len(played)),
        "tool_calls": torch.tensor([episode.calls for episode in played]),
        "tool_errors": torch.tensor([sum(is_refusal(turn) for turn in episode.transcript) for episode in played]),
        "malformed_tool_calls": torch.tensor([episode.malformed for episode in played]),
        **{f"truncated/{name}": torch.tensor([limit == name for limit in limits]) for name in LIMITS},
    }
    metrics = {name: float(values[~failed].float().mean()) for name, values in means.items()}
    turns = sum(episode.turns for episode in played)
    metrics["template_breaks"] = 100.0 * sum(episode.breaks for episode in played) / max(turns, 1)
    metrics["failed_episodes"] = float(failed.sum())
    metrics["failed_fraction"] = float(failed.float().mean())
    metrics |= outcome_metrics(total for total, episode in zip(totals, played, strict=True) if not episode.failure)
    return Rollout(
        [episode.sample for episode in played],
        [episode.completion for episode in played],
        data,
        rewards,
        accuracies,
        lengths,
        truncated,
        metrics,
        episode_of,
        failed,
        [episode.transcript for episode in played],
        [episode.failure for episode in played],
        parts=[parts_of(total) for total in totals],
        spans=[spans for episode in played for spans in [row.spans for row in episode.rows] or [()]],
    )


def parts_of(outcome: StepOutcome) -> dict[str, float]:
    """Return the metrics of an outcome that are its own, such as several rewards by name."""
    return {
        name: float(value) for name, value in outcome.metrics.items() if name not in ("accuracy", "reward_failures")
    }


def accuracy_of(outcome: StepOutcome) -> float:
    """Return the metric `accuracy`; without one, an outcome counts as correct if its reward is at least 1."""
    return float(outcome.metrics.get("accuracy", outcome.reward >= 1.0))


def _rows(
    played: Sequence[PlayedEpisode], pad_id: int, images: ImageInputs | None
) -> tuple[BatchedDataDict[Any], Tensor]:
    from rlframework.rollout.trajectory import TrainingRow

    one, none = torch.tensor([pad_id]), torch.zeros(1)
    empty = TrainingRow(one, none.bool(), none, (), torch.full((1,), -1))
    rows = [row for episode in played for row in episode.rows or (empty,)]
    episode_of = torch.tensor([number for number, episode in enumerate(played) for _ in episode.rows or (empty,)])
    logprobs = pad_sequence([row.logprobs for row in rows], batch_first=True)
    if not bool(torch.isfinite(logprobs).all()):
        raise RLFrameworkError("the model's probabilities are not finite: its weights contain NaN or infinity")
    data: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": pad_sequence([row.token_ids for row in rows], batch_first=True, padding_value=pad_id),
            "input_lengths": torch.tensor([len(row.token_ids) for row in rows]),
            "token_mask": pad_sequence([row.token_mask for row in rows], batch_first=True).float(),
            "generation_logprobs": logprobs,
        }
    )
    if images is not None:
        data.update(images.columns([row.pictures for row in rows], data["input_ids"]))
    return data, episode_of


def with_special_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, ended: bool) -> str:
    """Return the text of an answer's tokens `ids` with special ones, if the text without them hides something.

    That is so for special tokens before the one that ended the answer, if it has `ended`, and for an answer that
    consists of special tokens only, such as of its end. Otherwise the result is empty.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    inside = ids[:-1] if ended else ids
    if special.isdisjoint(inside) and not (ids and special.issuperset(ids)):
        return ""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))

"""Players: each plays groups of one sample in its own way, and joins groups into a rollout. The one of single turns.

A driver has groups played: `barrier` all of a rollout, and waits for the last; `asynchronous` each that the ledger
admits. `step_rollouts.group_player` chooses the player of a run.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from rlframework.base.errors import UserError
from rlframework.datasets.chat.rendering import render_prompt
from rlframework.generation.batch import batch_of
from rlframework.interfaces.environment import Sample, StepOutcome
from rlframework.interfaces.generation import GenerationResult, WeightSpan
from rlframework.interfaces.messages import pictures_of
from rlframework.rollout.result import Rollout
from rlframework.rollout.single_turn import NO_MEDIA, media_of, rollout_of_turns, score_turns, single_turns

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.environments.dataset import DatasetEnvironment
    from rlframework.rollout.episode_thread import Bridge
    from rlframework.rollout.parts import Parts

G = TypeVar("G")


class GroupPlayer(ABC, Generic[G]):
    """Plays groups: several completions, or episodes, of one sample each."""

    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end a completion besides those of the run."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.pad_id = int(parts.tokenizer.pad_token_id)

    @abstractmethod
    def playing(self, bridge: Bridge) -> AbstractAsyncContextManager[None]:
        """Return a context in which groups are played on `bridge`, in one event loop; the driver has the rest."""

    @abstractmethod
    async def play(self, sample: Sample, seeds: Sequence[int]) -> G:
        """Play `sample` with each of `seeds`."""

    @abstractmethod
    def spans(self, group: G) -> Iterable[WeightSpan]:
        """Return the spans of all sampled tokens of `group`."""

    @abstractmethod
    def rollout(self, groups: Sequence[tuple[Sample, int, G | str]]) -> Rollout:
        """Return the rollout of samples with the number of their rows, and their groups or why these have failed."""

    @abstractmethod
    def play_all(self, samples: Sequence[Sample], seeds: Tensor, *, temperature: float | None = None) -> Rollout:
        """Play each of `samples` with its one of `seeds [E]` int64, and wait for all.

        `temperature`: of sampling, 0 to decode greedily; None: that of the run.
        """

    def close(self) -> None:
        """End all that was started."""


@dataclass(frozen=True, eq=False)
class Turns:
    """The scored completions of a group, and the tokens of its prompt."""

    prompt: torch.Tensor
    results: Sequence[GenerationResult]
    texts: Sequence[str]
    outcomes: Sequence[StepOutcome]


@dataclass(eq=False)
class _Unscored:
    """Completions that wait until the environment scores them."""

    samples: Sequence[Sample]
    texts: Sequence[str]
    outcomes: asyncio.Future[list[StepOutcome]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class SingleTurnPlayer(GroupPlayer[Turns]):
    """Completes prompts. The environment scores, in a thread of its own, all that waits for it in one call.

    Failures of rewards are counted over the answers of a rollout, as in synchronous training.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        # kept between contexts, because the process of a reward function ends with the thread that started it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")

    @asynccontextmanager
    async def playing(self, bridge: Bridge) -> AsyncIterator[None]:
        """See `GroupPlayer.playing`."""
        self._bridge = bridge
        self._count_calls(False)
        self._unscored: list[_Unscored] = []
        self._scoring: asyncio.Task[None] | None = None
        try:
            yield
        finally:
            self._count_calls(True)

    def close(self) -> None:
        """See `GroupPlayer.close`."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def play(self, sample: Sample, seeds: Sequence[int]) -> Turns:
        """See `GroupPlayer.play`."""
        prompt, media = self._prompt(sample), self._media(sample)
        session = self._bridge.begin()
        try:
            await asyncio.sleep(0)  # until all groups that were admitted together have begun
            results = await self._bridge.complete_group(prompt, seeds, session, media)
        finally:
            self._bridge.end(session)
        ids = [result.token_ids.tolist() for result in results]
        texts: list[str] = self.parts.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return Turns(prompt, results, texts, await self._scored([sample] * len(seeds), texts))

    def play_all(self, samples: Sequence[Sample], seeds: Tensor, *, temperature: float | None = None) -> Rollout:
        """See `GroupPlayer.play_all`. The prompts are one batch of the engines, and the answers one of the rewards."""
        return single_turns(self.parts, samples, seeds, temperature=temperature)

    def spans(self, group: Turns) -> Iterable[WeightSpan]:
        """See `GroupPlayer.spans`."""
        return (span for result in group.results for span in result.spans)

    def rollout(self, groups: Sequence[tuple[Sample, int, Turns | str]]) -> Rollout:
        """See `GroupPlayer.rollout`."""
        nothing = torch.empty(0, dtype=torch.int64)
        none = GenerationResult("", nothing, nothing.float(), "aborted", ())
        samples, prompts, failed = list[Sample](), list[torch.Tensor](), list[bool]()
        results, texts, outcomes = list[GenerationResult](), list[str](), list[StepOutcome]()
        for sample, rows, group in groups:
            if isinstance(group, str):
                outcome = StepOutcome(0.0, metrics={"accuracy": 0.0})
                group = Turns(self._prompt(sample), [none] * rows, [""] * rows, [outcome] * rows)
                failed += [True] * rows
            else:
                failed += [False] * rows
            samples += [sample] * rows
            prompts += [group.prompt] * rows
            results += group.results
            texts += group.texts
            outcomes += group.outcomes
        if (environment := self._dataset()) is not None:
            environment.require_scored(outcomes)
        output = batch_of(results, prompts, self.pad_id)
        result = rollout_of_turns(samples, output, texts, outcomes, torch.tensor(failed))
        result.spans = [_moved(each.spans, len(prompt)) for prompt, each in zip(prompts, results, strict=True)]
        result.data.update(media_of(self.parts, samples, result.data["input_ids"]))
        return result

    def _prompt(self, sample: Sample) -> torch.Tensor:
        return torch.tensor(render_prompt(self.parts.tokenizer, sample.messages, images=self.parts.images))

    def _media(self, sample: Sample) -> Mapping[str, torch.Tensor]:
        images, pictures = self.parts.images, pictures_of(sample.messages)
        return images.processed(pictures).tensors if images is not None and pictures else NO_MEDIA

    def _count_calls(self, counts: bool) -> None:
        if (environment := self._dataset()) is not None:
            environment.counts_calls = counts

    def _dataset(self) -> DatasetEnvironment | None:
        """The environment, if it counts failures of rewards."""
        from rlframework.environments.dataset import DatasetEnvironment

        environment = self.parts.environment
        return environment if isinstance(environment, DatasetEnvironment) else None

    async def _scored(self, samples: Sequence[Sample], texts: Sequence[str]) -> list[StepOutcome]:
        unscored = _Unscored(samples, texts)
        self._unscored.append(unscored)
        if self._scoring is None or self._scoring.done():
            self._scoring = asyncio.create_task(self._score())
        return await unscored.outcomes

    async def _score(self) -> None:
        while self._unscored:
            waiting, self._unscored = self._unscored, []
            try:
                await self._score_together(waiting)
            except UserError as error:
                self._reject(waiting, error)
            except Exception as error:  # noqa: BLE001 - raised by `play` of the groups that it concerns
                if len(waiting) == 1:
                    self._reject(waiting, error)
                    continue
                for each in waiting:
                    try:
                        await self._score_together([each])
                    except Exception as own:  # noqa: BLE001 - as above
                        self._reject([each], own)

    async def _score_together(self, waiting: Sequence[_Unscored]) -> None:
        samples = [sample for each in waiting for sample in each.samples]
        texts = [text for each in waiting for text in each.texts]
        loop = asyncio.get_running_loop()
        outcomes = list(await loop.run_in_executor(self._thread, score_turns, self.parts, samples, texts))
        for each in waiting:
            own, outcomes = outcomes[: len(each.samples)], outcomes[len(each.samples) :]
            if not each.outcomes.done():  # its group may have been cancelled
                each.outcomes.set_result(own)

    def _reject(self, waiting: Sequence[_Unscored], error: Exception) -> None:
        for each in waiting:
            if not each.outcomes.done():
                each.outcomes.set_exception(error)


def _moved(spans: Iterable[WeightSpan], by: int) -> tuple[WeightSpan, ...]:
    """Return the spans of a completion as those of its row, whose prompt has `by` tokens."""
    return tuple(WeightSpan(start + by, end + by, version) for start, end, version in spans)

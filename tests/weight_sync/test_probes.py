"""Probes see how an engine computes tokens: which weights it decodes with, when, and at which temperature."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_refits import VOCABULARY, Run, TinyEngine
from torch import Tensor

from rlframework.base.errors import EngineFault, RefitError
from rlframework.interfaces.generation import (
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    WeightReport,
    WeightSpan,
)
from rlframework.weight_sync.probes import Probes, probe_shapes
from rlframework.weight_sync.proof import NoiseBound


def refit_twice(run: Run, step: float = 1.0) -> None:
    for _ in range(2):
        run.refitter.refit()
        run.step(step)


class UntiedHead(TinyEngine):
    """The head is no longer the embedding after the first update, but a copy."""

    def finish_weight_update(self) -> WeightReport:
        report = super().finish_weight_update()
        if self.model.heads[0] is self.model.embed:
            self.model.heads = [self.model.embed.detach().clone()]
        return report


class LostBuffer(TinyEngine):
    """Memory that is allocated again does not get the buffers that are not saved."""

    def restore(self, tags: Any = ()) -> int:
        if "weights" in tags:
            self.model.decay.zero_()
        return 0


class Truncated(TinyEngine):
    """Log-probabilities after top-k are returned instead of those before it."""

    def reported(self, logprobs: Tensor, sampling: SamplingParams) -> Tensor:
        kept = logprobs.topk(sampling.top_k).values
        return logprobs - kept.logsumexp(0)


class Versions(TinyEngine):
    """Computes some tokens with weights of other versions, of which it keeps copies."""

    def __init__(self) -> None:
        super().__init__()
        self.models: list[Any] = []
        self.rows = 0

    def finish_weight_update(self) -> WeightReport:
        report = super().finish_weight_update()
        self.models.append(deepcopy(self.model))
        return report

    def submit(self, requests: Any) -> None:
        super().submit(requests)
        self.rows = len(requests)

    def _complete(self, request: GenerationRequest, version: int) -> GenerationResult:
        self.request = request
        return super()._complete(request, version)

    def _next(self, ids: Tensor, sampling: SamplingParams) -> Tensor:
        sampled = len(ids) - len(self.request.prompt_ids)
        return self.weights(sampled).logprobs(self.weights(sampled).prefix(ids), self.temperature(sampled, sampling))

    def weights(self, sampled: int) -> Any:
        """The model that computes the token after `sampled` ones."""
        return self.models[-1]

    def temperature(self, sampled: int, sampling: SamplingParams) -> float:
        return sampling.temperature


class FrozenGraph(Versions):
    """The graph of decoding is captured once, with the weights of the first version."""

    def weights(self, sampled: int) -> Any:
        return self.models[0 if sampled else -1]


class VersionBefore(Versions):
    """Tokens after the first are of the version before."""

    def weights(self, sampled: int) -> Any:
        return self.models[-2:][0 if sampled else -1]


class ManyRows(Versions):
    """More than four rows are decoded with old weights."""

    def weights(self, sampled: int) -> Any:
        return self.models[0 if self.rows > 4 else -1]


class LongPrompts(Versions):
    """Prompts above 48 tokens are computed with old weights."""

    def weights(self, sampled: int) -> Any:
        return self.models[0 if len(self.request.prompt_ids) > 48 else -1]


class LaterTemperature(Versions):
    """Tokens after the first are sampled at temperature 1."""

    def temperature(self, sampled: int, sampling: SamplingParams) -> float:
        return 1.0 if sampled else sampling.temperature


class AsManyAsItDecodes(Versions):
    """Rows that wait until others have finished are computed with old weights: more than the 8 decoded at a time."""

    def weights(self, sampled: int) -> Any:
        return self.models[0 if self.rows > 8 else -1]


DECODING: list[Callable[[], TinyEngine]] = [
    FrozenGraph, VersionBefore, ManyRows, LongPrompts, LaterTemperature, AsManyAsItDecodes
]  # fmt: skip


@pytest.mark.parametrize("engine", DECODING)
def test_a_fault_of_decoding_is_detected_at_the_second_refit(engine: Any) -> None:
    """Also one that a step of a small learning rate makes: of some 0.01 in log-probabilities."""
    for step in (1.0, 0.01):
        run = Run([TinyEngine(), engine()], SamplingParams(0.8), probes=6)
        with pytest.raises(RefitError, match="engine 1 was refit to version"):
            refit_twice(run, step)


@pytest.mark.parametrize("engine", [FrozenGraph, VersionBefore, ManyRows, LongPrompts])
def test_a_fault_of_decoding_is_detected_at_any_later_refit(engine: Any) -> None:
    """The third one is not thorough, and after it weights change for the first time, as after a warm-up."""
    run = Run([TinyEngine(), engine()], SamplingParams(0.8), probes=6)
    for _ in range(2):
        run.refitter.refit()
        run.worker.progress.weights_version += 1
    run.step(0.01)
    with pytest.raises(RefitError, match="engine 1 was refit to version 4"):
        run.refitter.refit()


@pytest.mark.parametrize(
    ("engine", "sampling"),
    [
        (UntiedHead, SamplingParams()),
        (LostBuffer, SamplingParams()),
        (Truncated, SamplingParams(top_k=3)),
    ],
)
def test_probes_see_what_checksums_of_weights_cannot(engine, sampling):
    run = Run([engine()], sampling)
    with pytest.raises(RefitError, match=r"engine 0 was refit to version .* log-probability .* the trainer"):
        refit_twice(run)
    refit_twice(Run([engine()], sampling, probes=0))


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_probes_compare_at_the_temperature_of_the_run(temperature):
    assert Run(sampling=SamplingParams(temperature)).refitter.refit().probe_error < 1e-5


def test_shapes_cover_few_and_many_rows_short_and_long_prompts():
    usual = probe_shapes(3, thorough=False, batch_size=256, positions=None)
    assert usual == [(56, 3), (5, 3), (5, 3)]
    thorough = [(56, 8), (256, 8), (5, 8)]
    assert probe_shapes(3, thorough=True, batch_size=4, positions=None) == [*thorough, *[(5, 2)] * 2]  # one more than 4
    assert probe_shapes(3, thorough=True, batch_size=256, positions=None) == [*thorough, *[(5, 2)] * 9]  # 12 in all
    assert probe_shapes(3, thorough=True, batch_size=1, positions=None) == thorough
    assert probe_shapes(1, thorough=True, batch_size=1, positions=None) == [(56, 8), (5, 2)]
    assert probe_shapes(3, thorough=False, batch_size=256, positions=20) == [(17, 3), (5, 3), (5, 3)]
    assert probe_shapes(3, thorough=True, batch_size=1, positions=20) == [(12, 8), (12, 8), (5, 8)]
    assert probe_shapes(2, thorough=False, batch_size=256, positions=3) == [(1, 2), (1, 2)]


def test_prompts_repeat_in_part_with_their_sessions():
    probes = Probes(4, range(5, VOCABULARY), SamplingParams(), NoiseBound(0.1, headroom=10.0))
    of_refits = [probes.of_version(version).requests for version in (1, 2, 3, 4)]
    assert [len(requests) for requests in of_refits] == [4, 4, 4, 4]
    one, two = of_refits[0], of_refits[1]
    same = [torch.equal(left.prompt_ids, right.prompt_ids) for left, right in zip(one, two, strict=True)]
    assert same == [True, False, True, False]
    assert [left.session_id == right.session_id for left, right in zip(one, two, strict=True)] == [*same[:3], True]
    assert [request.session_id is None for request in one] == [False, False, False, True]
    every = [request for requests in of_refits for request in requests]
    assert all(int(each.prompt_ids.min()) >= 5 for each in every)
    assert len({each.request_id for each in every}) == len(every)
    assert [requests[0].max_new_tokens for requests in of_refits] == [8, 8, 3, 8]  # thorough: 1, 2, 4


def test_the_trainer_scores_each_completion_once_whatever_the_number_of_engines():
    run = Run([TinyEngine(), TinyEngine(), TinyEngine()])
    scored = list[Any]()
    get = run.worker.get_logprobs
    run.worker.get_logprobs = lambda data, positions: scored.append(data) or get(data, positions)
    run.refitter.refit()
    (rows,) = scored
    assert len(rows["input_ids"]) == 16
    assert rows["input_lengths"].tolist() == [64, 264, 13, 13, *[7] * 12]
    assert rows["token_mask"].sum(1).tolist() == [8.0, 8.0, 8.0, 8.0, *[2.0] * 12]


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        (lambda made: {"logprobs": made.logprobs * torch.nan}, "the log-probability of token 0 is nan"),
        (lambda made: {"logprobs": made.logprobs.tolist()}, "logprobs is a list"),
        (lambda made: {"token_ids": made.token_ids.float()}, r"token_ids is torch.float32"),
        (lambda made: {"token_ids": made.token_ids.fill_(VOCABULARY)}, "token 0 is 24; the model's tokens are 0 to 23"),
        (lambda made: {"spans": None}, "spans is None"),
        (lambda made: {"finish_reason": "aborted"}, "nobody has aborted the request"),
    ],
)
def test_an_answer_that_breaks_the_contract_of_results_ends_the_refit(changes: Any, wrong: str) -> None:
    run = Run()

    class Wrong(TinyEngine):
        def _complete(self, request: GenerationRequest, version: int) -> GenerationResult:
            made = super()._complete(request, version)
            return replace(made, **changes(made))

    run.handles[0].group.worker.engine = Wrong()
    with pytest.raises(EngineFault, match=rf"engine 0 \('tiny'\) broke the contract .* request '\w+:\d+\.1' .*{wrong}"):
        run.refitter.refit()


def test_a_completion_of_another_length_is_no_answer():
    run = Run()

    class Stopped(TinyEngine):
        def _complete(self, request: GenerationRequest, version: int) -> GenerationResult:
            return super()._complete(replace(request, max_new_tokens=1), version)

    run.handles[0].group.worker.engine = Stopped()
    with pytest.raises(
        RefitError, match=r"probe 0 of version 1 with 1 tokens of versions \[1\]; expected 8 of version"
    ):
        run.refitter.refit()


def test_an_answer_may_have_several_spans_of_its_version():
    """Spans are consecutive and cover all tokens; an engine may report each step of decoding as one."""
    run = Run()

    class Stepwise(TinyEngine):
        def _complete(self, request: GenerationRequest, version: int) -> GenerationResult:
            spans = tuple(WeightSpan(token, token + 1, version) for token in range(request.max_new_tokens))
            return replace(super()._complete(request, version), spans=spans)

    run.handles[0].group.worker.engine = Stepwise()
    assert run.refitter.refit().version == 1

"""Mutants that compute some tokens otherwise: with weights of another version, or at another temperature."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from rlframework.interfaces.generation import GenerationRequest, GenerationResult, WeightReport
from rlframework_conformance.mutants.generation_engine.changes import broken_sampling, model_of, observed
from rlframework_conformance.mutants.mutant import mutant

_LAST_UPDATE = "test_the_weights_of_the_last_update_count"
_OLDER = "test_nothing_computed_with_older_weights_is_used"
_SESSIONS = "test_every_session_uses_the_weights_of_the_last_update"
_TEMPERATURE = "test_logprobs_of_samples_are_at_the_sampling_temperature"

_Choice = Callable[[Any, GenerationRequest, int], int]
"""Returns which of `engine.models` computes a token, given its request and the number of tokens before it."""
_NEWEST = -1


def _newest(engine: Any, request: GenerationRequest, count: int) -> int:
    return _NEWEST


def _recomputed_by(choose: _Choice = _newest, temperature: float | None = None) -> Callable[[Any], type]:
    """Break the weights of tokens: one after `count` others of its request is of `choose(self, request, count)`.

    `temperature`: that of tokens after the first; None: that of the request.
    """

    def break_it(part: Any) -> type:
        class Broken(observed(part)):  # type: ignore[misc]
            beside = 0

            def __init__(self, config: Any, tokenizer: Any, **place: Any) -> None:
                super().__init__(config, tokenizer, **place)
                self.models: list[Any] = []

            def attach(self, model: Any, version: int) -> None:
                super().attach(model, version)
                self.models.append(copy.deepcopy(model).cpu().eval())

            def begin_weight_update(self, version: int, specs: Any) -> None:
                super().begin_weight_update(version, specs)
                self.arrived: dict[str, Tensor] = {}

            def load_weights(self, weights: Any) -> None:
                given = {name: tensor.clone() for name, tensor in weights}
                super().load_weights(given.items())
                self.arrived |= given

            def finish_weight_update(self) -> WeightReport:
                report: WeightReport = super().finish_weight_update()
                self.models.append(model_of(self.directory, self.arrived))
                return report

            def submit(self, requests: Sequence[GenerationRequest]) -> None:
                super().submit(requests)
                self.beside = len(requests)

            def poll(self, timeout: float | None = 0.0) -> list[GenerationResult]:
                return [_recomputed(self, result, choose, temperature) for result in super().poll(timeout)]

        return Broken

    return break_it


@torch.no_grad()
def _recomputed(engine: Any, result: GenerationResult, choose: _Choice, later: float | None) -> GenerationResult:
    """Return the result with the tokens (greedy) and log-probabilities of the models that `choose` names."""
    request: GenerationRequest = engine.asked[result.request_id]
    greedy, asked = request.sampling.greedy, request.sampling.temperature or 1.0
    ids, logprobs = request.prompt_ids, list[Tensor]()
    for count, sampled in enumerate(result.token_ids):
        model = engine.models[choose(engine, request, count)]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, -1]
        logs = torch.log_softmax(logits / (asked if later is None or greedy or not count else later), -1)
        token = logs.argmax() if greedy else sampled
        logprobs.append(logs[token])
        ids = torch.cat((ids, token[None]))
    return GenerationResult(
        result.request_id, ids[len(request.prompt_ids) :], torch.stack(logprobs), result.finish_reason, result.spans
    )


def _first_after_one(engine: Any, request: GenerationRequest, count: int) -> int:
    return 0 if count else _NEWEST


def _previous_after_one(engine: Any, request: GenerationRequest, count: int) -> int:
    return max(len(engine.models) - 2, 0) if count else _NEWEST


def _first_in_many_rows(engine: Any, request: GenerationRequest, count: int) -> int:
    return 0 if engine.beside > 4 else _NEWEST


def _first_after_long_prompts(engine: Any, request: GenerationRequest, count: int) -> int:
    return 0 if len(request.prompt_ids) > 48 else _NEWEST


def _first_in_a_quarter_of_sessions(engine: Any, request: GenerationRequest, count: int) -> int:
    return 0 if request.session_id is not None and crc32(request.session_id.encode()) % 4 == 0 else _NEWEST


_frozen_graph = mutant(
    "frozen_graph",
    "Tokens after the first are computed with the first weights, as captured in a graph.",
    _LAST_UPDATE,
    _OLDER,
)(_recomputed_by(_first_after_one))

_previous_version = mutant(
    "previous_version_after_the_first_token",
    "Tokens after the first are computed with the weights before the last update.",
    _LAST_UPDATE,
    _OLDER,
)(_recomputed_by(_previous_after_one))

_many_rows = mutant(
    "many_rows_on_old_weights", "If more than four rows are decoded at once, their weights are the first.", _LAST_UPDATE
)(_recomputed_by(_first_in_many_rows))

_long_prompts = mutant(
    "long_prompts_on_old_weights", "Prompts of more than 48 tokens are completed with the first weights.", _OLDER
)(_recomputed_by(_first_after_long_prompts))

_some_sessions = mutant(
    "some_sessions_on_old_weights", "A quarter of the sessions is served with the first weights.", _SESSIONS
)(_recomputed_by(_first_in_a_quarter_of_sessions))

_later_temperature = mutant(
    "later_tokens_at_temperature_one", "Tokens after the first are sampled and scored at temperature 1.", _TEMPERATURE
)(_recomputed_by(temperature=1.0))

_temperature_rounded = mutant("temperature_rounded", "Temperatures are rounded to one decimal.", _TEMPERATURE)(
    broken_sampling(lambda engine, request: {"temperature": round(request.sampling.temperature, 1)})
)

"""Mutants that compute some tokens otherwise: with weights of another version, or at another temperature."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from rlframework.interfaces.generation import GenerationEngine, GenerationRequest, GenerationResult
from rlframework_conformance.mutants.generation_engine.changes import broken_sampling, model_of, observed
from rlframework_conformance.mutants.mutant import around, mutant, together

_Choice = Callable[[Any, Any, int], int]
"""Returns which of `engine.models` computes a token, given its request and the number of tokens before it."""
_NEWEST = -1


def _recomputed_by(choose: _Choice, temperature: float | None = None) -> Callable[[Any], type]:
    """Break the weights of tokens: one after `count` others of its request is of `choose(self, request, count)`.

    `temperature`: that of tokens after the first; None: that of the request.
    """

    @around(GenerationEngine.poll)
    def poll(sound: Any, engine: Any, timeout: float | None = 0.0) -> list[GenerationResult]:
        return [_recomputed(engine, result, choose, temperature) for result in sound(timeout)]

    return together(observed, _keeps_attached, _keeps_updated, poll)


@around(GenerationEngine.attach)
def _keeps_attached(attach: Any, engine: Any, model: Any, version: int) -> None:
    attach(model, version)
    vars(engine).setdefault("models", []).append(copy.deepcopy(model).cpu().eval())


@around(GenerationEngine.finish_weight_update)
def _keeps_updated(finish: Any, engine: Any) -> Any:
    report = finish()
    vars(engine).setdefault("models", []).append(model_of(engine.directory, engine.arrived))
    return report


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


_frozen_graph = mutant(
    "frozen_graph", "Tokens after the first are computed with the first weights, as captured in a graph."
)(_recomputed_by(lambda engine, request, count: 0 if count else _NEWEST))

_previous_version = mutant(
    "previous_version_after_the_first_token",
    "Tokens after the first are computed with the weights before the last update.",
)(_recomputed_by(lambda engine, request, count: max(len(engine.models) - 2, 0) if count else _NEWEST))

_many_rows = mutant(
    "many_rows_on_old_weights", "If more than four rows are decoded at once, their weights are the first."
)(_recomputed_by(lambda engine, request, count: 0 if engine.beside > 4 else _NEWEST))

_long_prompts = mutant(
    "long_prompts_on_old_weights", "Prompts of more than 48 tokens are completed with the first weights."
)(_recomputed_by(lambda engine, request, count: 0 if len(request.prompt_ids) > 48 else _NEWEST))


@_recomputed_by
def _first_in_a_quarter_of_sessions(engine: Any, request: GenerationRequest, count: int) -> int:
    return 0 if request.session_id is not None and crc32(request.session_id.encode()) % 4 == 0 else _NEWEST


_some_sessions = mutant("some_sessions_on_old_weights", "A quarter of the sessions is served with the first weights.")(
    _first_in_a_quarter_of_sessions
)

_later_temperature = mutant(
    "later_tokens_at_temperature_one", "Tokens after the first are sampled and scored at temperature 1."
)(_recomputed_by(lambda engine, request, count: _NEWEST, temperature=1.0))

_temperature_rounded = mutant("temperature_rounded", "Temperatures are rounded to one decimal.")(
    broken_sampling(lambda engine, request: {"temperature": round(request.sampling.temperature, 1)})
)

"""Mutants that sample the wrong tokens, or compute some of them with other weights or at another temperature."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from rlframework.interfaces.generation import GenerationEngine, GenerationRequest, GenerationResult
from rlframework.plugins.types import Capability
from rlframework_conformance.mutants.generation_engine.changes import (
    broken_module,
    broken_requests,
    broken_sampling,
    model_of,
    observed,
)
from rlframework_conformance.mutants.mutant import around, mutant, together

_EMBEDDED = frozenset({Capability.EMBEDDED_GENERATION})


def _with_a_second_token(poll: Any, engine: Any, timeout: float | None = 0.0) -> list[GenerationResult]:
    """Complete two tokens by two requests of one token, with the same seed."""
    first, finished = vars(engine).setdefault("first", {}), list[GenerationResult]()
    while not finished and (results := poll(timeout)):
        for result in results:
            name = result.request_id
            if name in first:
                finished.append(replace(result, token_ids=torch.cat((first.pop(name), result.token_ids))))
            elif result.finish_reason == "stop":
                finished.append(result)
            else:
                first[name], asked = result.token_ids, engine.asked[name]
                engine.submit([replace(asked, prompt_ids=torch.cat((asked.prompt_ids, first[name])))])
    return finished


@mutant("sampling_of_the_batch", "Requests that are submitted together are all sampled like the first.")
@around(GenerationEngine.submit)
def _sampling_of_the_batch(submit: Any, _: Any, requests: Sequence[GenerationRequest]) -> None:
    submit([replace(request, sampling=requests[0].sampling) for request in requests])


def _arrivals(engine: Any) -> int:
    """Return the number of requests before this one."""
    engine.arrivals = getattr(engine, "arrivals", -1) + 1
    return int(engine.arrivals)


# -- padding, positions and dropout ------------------------------------------------------------------------------------


@mutant("padding_attended_to", "Prompts are padded on the left, and attend to the padding.")
@around(GenerationEngine.submit)
def _padding_attended_to(submit: Any, _: Any, requests: Sequence[GenerationRequest]) -> None:
    width = max(len(one.prompt_ids) for one in requests)
    pad = torch.nn.functional.pad
    submit([replace(one, prompt_ids=pad(one.prompt_ids, (width - len(one.prompt_ids), 0))) for one in requests])


@mutant("padding_has_positions", "The positions of a prompt start after one of padding.", needs=_EMBEDDED)
@broken_module
def _padding_has_positions(module: Any) -> None:
    positions = module.transformer.wpe.weight
    positions.data = positions.data.roll(-1, dims=0)


@mutant("dropout_left_on", "The module stays in training mode while generating.", needs=_EMBEDDED)
@broken_module
def _dropout_left_on(module: Any) -> None:
    module.train = lambda mode=True: module


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


@_recomputed_by
def _first_in_a_quarter_of_sessions(engine: Any, request: GenerationRequest, count: int) -> int:
    return 0 if request.session_id is not None and crc32(request.session_id.encode()) % 4 == 0 else _NEWEST


MUTANTS = (
    mutant("greedy_ignored", "Greedy completions are sampled.")(
        broken_sampling(lambda engine, request: {"temperature": request.sampling.temperature or 1.0, "top_k": None})
    ),
    mutant("samples_are_greedy", "Sampling always picks the most likely token.")(
        broken_sampling(lambda engine, request: {"temperature": 0.0})
    ),
    mutant("one_draw_a_request", "All tokens of a completion are drawn with the same random number.")(
        together(
            broken_requests(lambda engine, request: {"max_new_tokens": 1}),
            around(GenerationEngine.poll)(_with_a_second_token),
        )
    ),
    mutant("top_k_one_too_many", "Top-k sampling keeps one token too many.")(
        broken_sampling(lambda engine, request: {"top_k": request.sampling.top_k and request.sampling.top_k + 1})
    ),
    mutant("top_p_ignored", "`top_p` has no effect.")(broken_sampling(lambda engine, request: {"top_p": 1.0})),
    mutant("top_p_rounded", "`top_p` is rounded to one decimal.")(
        broken_sampling(lambda engine, request: {"top_p": round(request.sampling.top_p, 1)})
    ),
    mutant("seed_by_arrival", "A request is seeded by the number of those before it.")(
        broken_requests(lambda engine, request: {"seed": _arrivals(engine)})
    ),
    mutant("seeds_of_32_bits", "Only the low 32 bits of a seed are used.")(
        broken_requests(lambda engine, request: {"seed": request.seed & 0xFFFFFFFF})
    ),
    mutant("sign_of_seeds_dropped", "A negative seed gives the sample of its absolute value.")(
        broken_requests(lambda engine, request: {"seed": min(abs(request.seed), 2**63 - 1)})
    ),
    mutant(
        "seed_by_place_in_the_batch",
        "Samples depend on how requests are batched, as with one generator for each batch.",
    )(broken_requests(lambda engine, request: {"seed": request.seed + _arrivals(engine) % engine.settings.batch_size})),
    mutant("frozen_graph", "Tokens after the first are computed with the first weights, as captured in a graph.")(
        _recomputed_by(lambda engine, request, count: 0 if count else _NEWEST)
    ),
    mutant(
        "previous_version_after_the_first_token",
        "Tokens after the first are computed with the weights before the last update.",
    )(_recomputed_by(lambda engine, request, count: max(len(engine.models) - 2, 0) if count else _NEWEST)),
    mutant("many_rows_on_old_weights", "If more than four rows are decoded at once, their weights are the first.")(
        _recomputed_by(lambda engine, request, count: 0 if engine.beside > 4 else _NEWEST)
    ),
    mutant("long_prompts_on_old_weights", "Prompts of more than 48 tokens are completed with the first weights.")(
        _recomputed_by(lambda engine, request, count: 0 if len(request.prompt_ids) > 48 else _NEWEST)
    ),
    mutant("some_sessions_on_old_weights", "A quarter of the sessions is served with the first weights.")(
        _first_in_a_quarter_of_sessions
    ),
    mutant("later_tokens_at_temperature_one", "Tokens after the first are sampled and scored at temperature 1.")(
        _recomputed_by(lambda engine, request, count: _NEWEST, temperature=1.0)
    ),
    mutant("temperature_rounded", "Temperatures are rounded to one decimal.")(
        broken_sampling(lambda engine, request: {"temperature": round(request.sampling.temperature, 1)})
    ),
)

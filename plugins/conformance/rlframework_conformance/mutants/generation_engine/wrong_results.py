"""Mutants of results: their log-probabilities, types, stop tokens, lengths, reasons and spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rlframework.interfaces.generation import GenerationEngine, GenerationRequest, GenerationResult, WeightSpan
from rlframework_conformance.mutants.generation_engine.changes import (
    around_observed,
    broken_requests,
    broken_results,
    broken_sampling,
    model_of,
)
from rlframework_conformance.mutants.mutant import around, mutant

_END = 1


@mutant("prompts_overwritten", "The memory of prompts is used for something else.")
@around_observed(GenerationEngine.poll)
def _prompts_overwritten(poll: Any, engine: Any, timeout: float | None = 0.0) -> Any:
    results = poll(timeout)
    for result in results:
        engine.asked[result.request_id].prompt_ids.zero_()
    return results


@mutant(
    "prompts_cut_at_an_end", "Prompts are truncated at the first end-of-sequence token, as where that is the pad token."
)
@broken_requests
def _prompts_cut_at_an_end(engine: Any, request: GenerationRequest) -> Mapping[str, Any]:
    prompt = request.prompt_ids
    ends = (prompt[1:] == _END).nonzero()
    return {"prompt_ids": prompt[: int(ends[0]) + 1] if len(ends) else prompt}


@mutant("stop_token_left_out", "The stop token is not part of the completion.")
@broken_results
def _without_stop_token(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    if result.finish_reason != "stop":
        return {}
    count = len(result.token_ids) - 1
    spans = tuple(WeightSpan(start, min(end, count), version) for start, end, version in result.spans)
    return {"token_ids": result.token_ids[:-1], "logprobs": result.logprobs[:-1], "spans": spans}


@mutant("reason_by_length", "A stop token as the last allowed token is reported as ended by its length.")
@broken_results
def _by_length(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    return {"finish_reason": "length"} if len(result.token_ids) == request.max_new_tokens else {}


@mutant("longest_of_the_batch", "Requests that are submitted together all get the most tokens of one.")
@around(GenerationEngine.submit)
def _longest_of_the_batch(submit: Any, _: Any, requests: Sequence[GenerationRequest]) -> None:
    most = max(request.max_new_tokens for request in requests)
    submit([replace(request, max_new_tokens=most) for request in requests])


@mutant("last_position_unused", "A completion ends one token before the model's last position.")
@broken_results
def _last_position_unused(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    count = len(result.token_ids) - 1
    if result.finish_reason != "length" or count + 1 == request.max_new_tokens:
        return {}
    return {"token_ids": result.token_ids[:count], "logprobs": result.logprobs[:count]}


@mutant("first_version_kept", "Spans have the version of the first weights.")
@broken_results
def _first_version(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    return {"spans": tuple(span._replace(version=1) for span in result.spans)}


@mutant("spans_without_the_last_token", "Spans end before the last token.")
@broken_results
def _without_last_token(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    *spans, last = result.spans
    return {"spans": (*spans, last._replace(end=last.end - 1))}


def _rescored(
    engine: Any, request: GenerationRequest, result: GenerationResult, temperature: float, top_k: int | None = None
) -> Mapping[str, Any]:
    """Recompute `logprobs` at `temperature`, over the `top_k` most likely tokens if given."""
    ids, start = torch.cat((request.prompt_ids, result.token_ids)), len(request.prompt_ids)
    with torch.no_grad():
        logits = model_of(engine.directory)(input_ids=ids[None]).logits[0, start - 1 : -1] / temperature
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    return {"logprobs": torch.log_softmax(logits, -1).gather(1, ids[start:, None])[:, 0]}


@mutant("temperature_on_one_side", "Samples are drawn at the temperature of their request but scored at temperature 1.")
@broken_results
def _at_temperature_one(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    return {} if request.sampling.greedy else _rescored(engine, request, result, 1.0)


@mutant("greedy_scored_at_temperature", "Greedy completions are scored at a sampling temperature.")
@broken_results
def _greedy_at_temperature(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    return _rescored(engine, request, result, 0.7) if request.sampling.greedy else {}


@mutant(
    "scored_after_top_k",
    "Log-probabilities are renormalized over the k most likely tokens, another truncation than the trainer's.",
)
@broken_results
def _after_top_k(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    sampling = request.sampling
    if sampling.greedy or sampling.top_k is None:
        return {}
    return _rescored(engine, request, result, sampling.temperature, sampling.top_k)


@mutant(
    "bound_of_fp32_for_bfloat16",
    "The declared bound of bfloat16 is one that only fp32 keeps, so sound refits are rejected.",
    break_record=lambda record: replace(record, probe_bounds={"bfloat16": 1e-5}),  # type: ignore[call-arg]
)
def _bound_of_fp32(part: Any) -> Any:
    return part


MUTANTS = (
    mutant("logprobs_of_bfloat16", "Log-probabilities come back as bfloat16.")(
        broken_results(lambda engine, request, result: {"logprobs": result.logprobs.bfloat16()})
    ),
    mutant("tokens_of_32_bits", "Token ids come back as int32.")(
        broken_results(lambda engine, request, result: {"token_ids": result.token_ids.int()})
    ),
    mutant("stop_tokens_ignored", "Stop tokens other than the end token have no effect.")(
        broken_sampling(lambda engine, request: {"stop_token_ids": request.sampling.stop_token_ids & {_END}})
    ),
    mutant("two_stop_tokens", "Only the two lowest stop tokens of a request end it.")(
        broken_sampling(
            lambda engine, request: {"stop_token_ids": frozenset(sorted(request.sampling.stop_token_ids)[:2])}
        )
    ),
    mutant("ends_of_its_own", "The engine also stops at the tokenizer's end-of-sequence token.")(
        broken_sampling(lambda engine, request: {"stop_token_ids": request.sampling.stop_token_ids | {_END}})
    ),
    mutant("always_stopped", "No completion is ever reported as ended by its length.")(
        broken_results(lambda engine, request, result: {"finish_reason": "stop"})
    ),
    mutant("one_token_too_many", "Completions get one token more than `max_new_tokens`.")(
        broken_requests(lambda engine, request: {"max_new_tokens": request.max_new_tokens + 1})
    ),
    mutant("temperature_ignored", "Samples are drawn and scored at temperature 1.")(
        broken_sampling(lambda engine, request: {"temperature": min(1.0, 1e6 * request.sampling.temperature)})
    ),
    mutant("logprobs_off_by_one", "Log-probabilities are shifted one position to the left.")(
        broken_results(lambda engine, request, result: {"logprobs": result.logprobs.roll(-1)})
    ),
    mutant("logprobs_in_bfloat16", "Log-probabilities have the precision of bfloat16.")(
        broken_results(lambda engine, request, result: {"logprobs": result.logprobs.bfloat16().float()})
    ),
)

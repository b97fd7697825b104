"""Mutants that compute the wrong log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from rlframework.interfaces.generation import GenerationRequest, GenerationResult
from rlframework_conformance.mutants.generation_engine.changes import broken_results, broken_sampling, model_of
from rlframework_conformance.mutants.mutant import mutant


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


_temperature_ignored = mutant("temperature_ignored", "Samples are drawn and scored at temperature 1.")(
    broken_sampling(lambda engine, request: {"temperature": min(1.0, 1e6 * request.sampling.temperature)})
)


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


@mutant("logprobs_off_by_one", "Log-probabilities are shifted one position to the left.")
@broken_results
def _shifted_left(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    return {"logprobs": result.logprobs.roll(-1)}


@mutant("logprobs_in_bfloat16", "Log-probabilities have the precision of bfloat16.")
@broken_results
def _in_bfloat16(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    return {"logprobs": result.logprobs.bfloat16().float()}


@mutant(
    "bound_of_fp32_for_bfloat16",
    "The declared bound of bfloat16 is one that only fp32 keeps, so sound refits are rejected.",
    break_record=lambda record: replace(record, probe_bounds={"bfloat16": 1e-5}),  # type: ignore[call-arg]
)
def _bound_of_fp32(part: Any) -> Any:
    return part

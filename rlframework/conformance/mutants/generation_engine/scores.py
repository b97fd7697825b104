"""Mutants that compute the wrong log-probabilities."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.conformance.mutants.generation_engine.base import broken_output, broken_settings, in_mode, mutant
from rlframework.conformance.mutants.mutant import Mutant

_SAMPLED = "test_logprobs_of_samples_are_at_the_sampling_temperature"
_TRUNCATED = "test_logprobs_are_those_before_top_k_and_top_p"


def _rescored(engine: Any, output: Any, temperature: float, top_k: int | None = None) -> dict[str, Any]:
    """Recompute `logprobs` at `temperature`, over the `top_k` most likely tokens if given."""
    logprobs = torch.zeros_like(output["logprobs"])
    for row, ids in enumerate(output["output_ids"]):
        end = int(output["unpadded_sequence_lengths"][row])
        start = end - int(output["generation_lengths"][row])
        with torch.no_grad(), in_mode(engine.module, training=False):
            logits = engine.module(input_ids=ids[None, :end].to(engine.module.device)).logits[0].cpu() / temperature
        if top_k is not None:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
        scored = torch.log_softmax(logits, -1)
        logprobs[row, start:end] = scored[start - 1 : end - 1].gather(1, ids[start:end, None])[:, 0]
    return {"logprobs": logprobs}


def _at_temperature_one(engine: Any, output: Any, greedy: bool) -> dict[str, Any]:
    return {} if greedy or not engine.settings.temperature else _rescored(engine, output, 1.0)


def _greedy_at_temperature(engine: Any, output: Any, greedy: bool) -> dict[str, Any]:
    return _rescored(engine, output, engine.settings.temperature or 1.0) if greedy else {}


def _after_top_k(engine: Any, output: Any, greedy: bool) -> dict[str, Any]:
    settings = engine.settings
    return {} if greedy or not settings.top_k else _rescored(engine, output, settings.temperature, settings.top_k)


def _shifted_left(engine: Any, output: Any, greedy: bool) -> dict[str, Any]:
    return {"logprobs": output["logprobs"].roll(-1, dims=1)}


def _in_bfloat16(engine: Any, output: Any, greedy: bool) -> dict[str, Any]:
    return {"logprobs": output["logprobs"].bfloat16()}


MUTANTS: tuple[Mutant, ...] = (
    mutant(
        "temperature_ignored",
        "Samples are drawn and scored at temperature 1.",
        broken_settings(lambda config: {"temperature": 1.0}),
        "test_samples_are_as_frequent_as_the_model_says",
        "test_a_temperature_of_zero_is_greedy",
        _SAMPLED,
    ),
    mutant(
        "temperature_on_one_side",
        "Samples are drawn at the configured temperature but scored at temperature 1.",
        broken_output(_at_temperature_one),
        _SAMPLED,
        _TRUNCATED,
    ),
    mutant(
        "greedy_scored_at_temperature",
        "Greedy completions are scored at the sampling temperature.",
        broken_output(_greedy_at_temperature),
        "test_greedy_logprobs_are_at_temperature_one",
    ),
    mutant(
        "scored_after_top_k",
        "Log-probabilities are renormalized over the k most likely tokens.",
        broken_output(_after_top_k),
        _TRUNCATED,
    ),
    mutant(
        "logprobs_off_by_one",
        "Log-probabilities are shifted one position to the left.",
        broken_output(_shifted_left),
        _SAMPLED,
        _TRUNCATED,
        "test_greedy_logprobs_are_at_temperature_one",
    ),
    mutant(
        "logprobs_in_bfloat16",
        "Log-probabilities come back in bfloat16.",
        broken_output(_in_bfloat16),
        "test_results_have_their_types_and_are_on_the_cpu",
        _SAMPLED,
    ),
)

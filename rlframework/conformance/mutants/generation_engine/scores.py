"""Mutants that compute the wrong log-probabilities."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.conformance.mutants.generation_engine.base import broken_output, broken_settings, in_mode
from rlframework.conformance.mutants.mutant import mutant

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


_temperature_ignored = mutant(
    "temperature_ignored",
    "Samples are drawn and scored at temperature 1.",
    "test_samples_are_as_frequent_as_the_model_says",
    "test_a_temperature_of_zero_is_greedy",
    _SAMPLED,
)(broken_settings(lambda config: {"temperature": 1.0}))


@mutant(
    "temperature_on_one_side",
    "Samples are drawn at the configured temperature but scored at temperature 1.",
    _SAMPLED,
    _TRUNCATED,
)
@broken_output
def _at_temperature_one(engine: Any, output: Any, greedy: bool) -> dict[str, Any]:
    return {} if greedy or not engine.settings.temperature else _rescored(engine, output, 1.0)


@mutant(
    "greedy_scored_at_temperature",
    "Greedy completions are scored at the sampling temperature.",
    "test_greedy_logprobs_are_at_temperature_one",
)
@broken_output
def _greedy_at_temperature(engine: Any, output: Any, greedy: bool) -> dict[str, Any]:
    return _rescored(engine, output, engine.settings.temperature or 1.0) if greedy else {}


@mutant("scored_after_top_k", "Log-probabilities are renormalized over the k most likely tokens.", _TRUNCATED)
@broken_output
def _after_top_k(engine: Any, output: Any, greedy: bool) -> dict[str, Any]:
    settings = engine.settings
    return {} if greedy or not settings.top_k else _rescored(engine, output, settings.temperature, settings.top_k)


@mutant(
    "logprobs_off_by_one",
    "Log-probabilities are shifted one position to the left.",
    _SAMPLED,
    _TRUNCATED,
    "test_greedy_logprobs_are_at_temperature_one",
)
@broken_output
def _shifted_left(engine: Any, output: Any, greedy: bool) -> dict[str, Any]:
    return {"logprobs": output["logprobs"].roll(-1, dims=1)}


@mutant(
    "logprobs_in_bfloat16",
    "Log-probabilities come back in bfloat16.",
    "test_results_have_their_types_and_are_on_the_cpu",
    _SAMPLED,
)
@broken_output
def _in_bfloat16(engine: Any, output: Any, greedy: bool) -> dict[str, Any]:
    return {"logprobs": output["logprobs"].bfloat16()}

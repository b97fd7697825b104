"""Mutants that sample the wrong tokens, or make samples depend on unrelated state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rlframework.interfaces.generation import GenerationRequest, GenerationResult
from rlframework.plugins.types import Capability
from rlframework_conformance.mutants.generation_engine.changes import (
    broken_module,
    broken_requests,
    broken_sampling,
    observed,
)
from rlframework_conformance.mutants.mutant import mutant

_GREEDY = "test_greedy_completions_are_those_of_plain_decoding"
_FREQUENCIES = "test_samples_are_as_frequent_as_the_model_says"
_BESIDE = "test_a_result_does_not_depend_on_the_requests_beside_it"
_WHEN = "test_a_result_does_not_depend_on_when_it_is_submitted"
_SEED = "test_the_seed_decides"
_EMBEDDED = frozenset({Capability.EMBEDDED_GENERATION})


_greedy_ignored = mutant("greedy_ignored", "Greedy completions are sampled.", _GREEDY)(
    broken_sampling(lambda engine, request: {"temperature": request.sampling.temperature or 1.0, "top_k": None})
)


_always_greedy = mutant("samples_are_greedy", "Sampling always picks the most likely token.", _FREQUENCIES, _SEED)(
    broken_sampling(lambda engine, request: {"temperature": 0.0})
)


@mutant("one_draw_a_request", "All tokens of a completion are drawn with the same random number.", _FREQUENCIES)
def _same_draw(part: Any) -> type:
    class Broken(observed(part)):  # type: ignore[misc]
        """Completes two tokens by two requests of one token, with the same seed."""

        def submit(self, requests: Sequence[GenerationRequest]) -> None:
            self.first: dict[str, GenerationResult] = {}
            super().submit([replace(request, max_new_tokens=1) for request in requests])

        def poll(self, timeout: float | None = 0.0) -> list[GenerationResult]:
            finished: list[GenerationResult] = []
            while not finished and (results := super().poll(timeout)):
                finished = [whole for result in results if (whole := self.joined(result)) is not None]
            return finished

        def joined(self, result: GenerationResult) -> GenerationResult | None:
            """Return a completion of one or two tokens; None after the first of two, whose second is requested."""
            name = result.request_id
            if (first := self.first.get(name)) is not None:
                return replace(result, token_ids=torch.cat((first.token_ids, result.token_ids)))
            if result.finish_reason == "stop":
                return result
            self.first[name] = result
            prompt = torch.cat((self.asked[name].prompt_ids, result.token_ids))
            super().submit([replace(self.asked[name], prompt_ids=prompt)])
            return None

    return Broken


_top_k_one_too_many = mutant(
    "top_k_one_too_many", "Top-k sampling keeps one token too many.", "test_top_k_leaves_the_k_most_likely_tokens"
)(broken_sampling(lambda engine, request: {"top_k": request.sampling.top_k and request.sampling.top_k + 1}))


_top_p_ignored = mutant("top_p_ignored", "`top_p` has no effect.", "test_top_p_leaves_the_nucleus")(
    broken_sampling(lambda engine, request: {"top_p": 1.0})
)


_top_p_rounded = mutant("top_p_rounded", "`top_p` is rounded to one decimal.", "test_top_p_leaves_the_nucleus")(
    broken_sampling(lambda engine, request: {"top_p": round(request.sampling.top_p, 1)})
)


_seed_by_arrival = mutant("seed_by_arrival", "A request is seeded by the number of those before it.", _BESIDE, _SEED)(
    broken_requests(lambda engine, request: {"seed": _arrivals(engine)})
)


_seeds_of_32_bits = mutant("seeds_of_32_bits", "Only the low 32 bits of a seed are used.", _SEED)(
    broken_requests(lambda engine, request: {"seed": request.seed & 0xFFFFFFFF})
)


_sign_of_seeds_dropped = mutant(
    "sign_of_seeds_dropped", "A negative seed gives the sample of its absolute value.", _SEED
)(broken_requests(lambda engine, request: {"seed": min(abs(request.seed), 2**63 - 1)}))


_sign_bit_of_seeds_dropped = mutant("sign_bit_of_seeds_dropped", "Only the low 63 bits of a seed are used.", _SEED)(
    broken_requests(lambda engine, request: {"seed": request.seed & (2**63 - 1)})
)


_seed_by_place_in_the_batch = mutant(
    "seed_by_place_in_the_batch",
    "Samples depend on how requests are batched, as with one generator for each batch.",
    "test_a_result_does_not_depend_on_how_requests_are_batched",
)(broken_requests(lambda engine, request: {"seed": request.seed + _arrivals(engine) % engine.settings.batch_size}))


@mutant("sampling_of_the_batch", "Requests that are submitted together are all sampled like the first.", _WHEN)
def _sampling_of_the_batch(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def submit(self, requests: Sequence[GenerationRequest]) -> None:
            super().submit([replace(request, sampling=requests[0].sampling) for request in requests])

    return Broken


def _arrivals(engine: Any) -> int:
    """Return the number of requests before this one."""
    engine.arrivals = getattr(engine, "arrivals", -1) + 1
    return int(engine.arrivals)


# -- padding, positions and dropout ------------------------------------------------------------------------------------


@mutant("padding_attended_to", "Prompts are padded on the left, and attend to the padding.", _GREEDY, _BESIDE)
def _padding_attended_to(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def submit(self, requests: Sequence[GenerationRequest]) -> None:
            width = max(len(request.prompt_ids) for request in requests)
            super().submit([replace(request, prompt_ids=_padded(request.prompt_ids, width)) for request in requests])

    return Broken


def _padded(prompt: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(prompt, (width - len(prompt), 0))


@broken_module
def _second_position_first(module: Any) -> None:
    positions = module.transformer.wpe.weight
    positions.data = positions.data.roll(-1, dims=0)


_padding_has_positions = mutant(
    "padding_has_positions",
    "The positions of a prompt start after one of padding.",
    "test_positions_count_from_the_first_token_of_the_prompt",
    needs=_EMBEDDED,
)(_second_position_first)


@broken_module
def _without_evaluation(module: Any) -> None:
    module.train = lambda mode=True: module


_dropout_left_on = mutant(
    "dropout_left_on",
    "The module stays in training mode while generating.",
    "test_dropout_is_off_while_generating",
    needs=_EMBEDDED,
)(_without_evaluation)

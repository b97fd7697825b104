"""Mutants that sample the wrong tokens, or make samples depend on unrelated state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from rlframework.conformance.mutants.generation_engine.base import (
    Break,
    broken_poll,
    broken_requests,
    broken_sampling,
    observed,
)
from rlframework.conformance.mutants.mutant import mutant
from rlframework.interfaces.generation import GenerationRequest, GenerationResult
from rlframework.plugins.types import Capability

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


_seed_by_arrival = mutant("seed_by_arrival", "A request is seeded by the number of those before it.", _BESIDE, _SEED)(
    broken_requests(lambda engine, request: {"seed": _arrivals(engine)})
)


_seeds_of_32_bits = mutant("seeds_of_32_bits", "Only the low 32 bits of a seed are used.", _SEED)(
    broken_requests(lambda engine, request: {"seed": request.seed & 0xFFFFFFFF})
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


# -- the forward of an attached module ---------------------------------------------------------------------------------


def _broken_forward(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Break:
    """Break the forward: the keyword arguments of the module are updated with `change(kwargs)`."""

    def poll(engine: Any, sound: Any, timeout: float | None) -> list[GenerationResult]:
        handle = engine.given_module.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, **change(kwargs)}), with_kwargs=True
        )
        try:
            results: list[GenerationResult] = sound(timeout)
            return results
        finally:
            handle.remove()

    return broken_poll(poll)


_padding_attended_to = mutant(
    "padding_attended_to", "Tokens attend to the padding of shorter prompts.", _GREEDY, _BESIDE, needs=_EMBEDDED
)(_broken_forward(lambda kwargs: {"attention_mask": None}))


def _positions_with_padding(kwargs: dict[str, Any]) -> dict[str, Any]:
    mask, ids = kwargs.get("attention_mask"), kwargs["input_ids"]
    if mask is None:
        return {}
    positions = torch.arange(mask.shape[1] - ids.shape[1], mask.shape[1], device=ids.device)
    return {"position_ids": positions.expand(ids.shape)}


_padding_has_positions = mutant(
    "padding_has_positions",
    "The positions of a prompt start at its padding.",
    "test_positions_count_from_the_first_token_of_the_prompt",
    needs=_EMBEDDED,
)(_broken_forward(_positions_with_padding))


@mutant(
    "dropout_left_on",
    "The module stays in training mode while generating.",
    "test_dropout_is_off_while_generating",
    needs=_EMBEDDED,
)
@broken_poll
def _in_training_mode(engine: Any, sound: Any, timeout: float | None) -> list[GenerationResult]:
    def keep_training(module: Any, args: Any) -> None:
        module.train()

    with _same_modes(engine.given_module):
        handle = engine.given_module.register_forward_pre_hook(keep_training)
        try:
            results: list[GenerationResult] = sound(timeout)
            return results
        finally:
            handle.remove()


@contextmanager
def _same_modes(module: Any) -> Iterator[None]:
    """Restore the modes of the modules afterwards."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        yield
    finally:
        for submodule, mode in modes:
            submodule.training = mode

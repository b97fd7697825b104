"""Decoding and sampling: greedy completions and log-probabilities of plain decoding, and the frequencies of samples.

Prompts with images are completed with their own, by the image encoder of the weights received last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlframework.interfaces.generation import GenerationRequest, GenerationResult, SamplingParams
from rlframework.plugins.types import Capability, GenerationEngineRecord
from rlframework_conformance import cases
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.generation.engine_harness import (
    END,
    PROMPTS,
    SPREAD,
    GenerationHarness,
    tokens_of,
)
from rlframework_conformance.suites.plain_decoding import PlainDecoder


class Decoding(Suite):
    """Completions and log-probabilities are what the model computes."""

    @holds(3)
    def test_greedy_completions_are_those_of_plain_decoding(self, harness: GenerationHarness) -> None:
        """Greedy completions must match plain decoding token by token, for ragged prompts, with log-probabilities at
        temperature 1.
        """
        results = harness.complete(harness.engine(), PROMPTS, max_new_tokens=16, temperature=0.0, top_k=2)
        harness.require_greedy("temperature 0", PROMPTS, results, harness.plain())
        lengths = [len(harness.plain().greedy(prompt, {END}, 16)) for prompt in PROMPTS]
        harness.equal("lengths of the completions", [len(result.token_ids) for result in results], lengths)

    @holds(3)
    def test_positions_count_from_the_first_token_of_the_prompt(self, harness: GenerationHarness) -> None:
        """Positions must count from the prompt's first token, not from padding.

        Tested with learned positions, because rotary positions are relative and hide the error.
        """
        path = cases.model("learned_positions", harness.models)
        results = harness.complete(harness.engine(path=path), PROMPTS, max_new_tokens=10, temperature=0.0)
        harness.require_greedy("learned positions", PROMPTS, results, harness.plain(path))

    @holds(3, Capability.EMBEDDED_GENERATION)
    def test_dropout_is_off_while_generating(self, harness: GenerationHarness) -> None:
        """Generation must disable dropout, even if the trainer passes a module in training mode."""
        path = cases.model("untied", harness.models)
        results = harness.complete(harness.engine(path=path), PROMPTS, max_new_tokens=10, temperature=0.0)
        harness.require_logprobs("dropout 0.5, training mode", PROMPTS, results, harness.plain(path))

    @holds(3)
    def test_logprobs_of_samples_are_at_the_sampling_temperature(self, harness: GenerationHarness) -> None:
        """Log-probabilities must be of the distribution that was sampled from, also if requests differ in it."""
        engine, plain = harness.engine(), harness.plain()
        for temperature in (0.6173, 1.0, 1.7321):
            results = harness.complete(engine, PROMPTS, max_new_tokens=12, temperature=temperature)
            harness.require_logprobs(f"temperature {temperature}", PROMPTS, results, plain, temperature)

    @holds(3)
    def test_logprobs_are_those_before_top_k_and_top_p(self, harness: GenerationHarness) -> None:
        """Log-probabilities must be those before top-k and top-p truncation.

        The trainer computes them from the full vocabulary; anything else would look like drift.
        """
        engine = harness.engine()
        for settings in ({"top_k": 3}, {"top_p": 0.8}):
            results = harness.complete(engine, PROMPTS, max_new_tokens=12, temperature=0.9, **settings)
            harness.require_logprobs(f"temperature 0.9, {settings}", PROMPTS, results, harness.plain(), 0.9)

    @holds(10)
    def test_logprobs_in_bfloat16_are_within_the_declared_bound(self, harness: GenerationHarness) -> None:
        """With bfloat16 weights, log-probabilities must be within `probe_bounds` of fp32 arithmetic, in the mean.

        A refit whose probes differ by more is rejected, so a bound that is too small would stop sound runs.
        """
        weights = {name: weight.bfloat16() for name, weight in harness.weights().items()}
        engine = harness.bare_engine(precision="bfloat16")
        harness.update(engine, weights, 1)
        results = harness.complete(engine, PROMPTS, max_new_tokens=12)
        plain = PlainDecoder(harness.path(), {name: weight.float().cpu() for name, weight in weights.items()})
        errors = [
            (result.logprobs - plain.logprobs([*prompt, *tokens_of(result)], len(prompt))[len(prompt) :]).abs()
            for prompt, result in zip(PROMPTS, results, strict=True)
        ]
        assert isinstance(harness.record, GenerationEngineRecord)
        bound = harness.record.probe_bounds["bfloat16"]
        harness.scalar("mean log-probability with rounding", 1.0 + float(torch.cat(errors).mean()), 1.0, bound)


class Sampling(Suite):
    """Tokens are drawn from the model's distribution, as the request's seed determines."""

    @holds(3)
    def test_samples_are_as_frequent_as_the_model_says(self, harness: GenerationHarness) -> None:
        """The frequencies of 3000 sampled token pairs must fit the model.

        Pairs show whether the two draws are independent.
        """
        engine = harness.engine(batch_size=1000)
        results = harness.complete(engine, [SPREAD] * 3000, max_new_tokens=2, temperature=0.7)
        shares = harness.plain().two_tokens(SPREAD, END, 0.7)
        harness.require_frequencies("3000 pairs of tokens at temperature 0.7", results, shares)

    @holds(3)
    def test_top_k_leaves_the_k_most_likely_tokens(self, harness: GenerationHarness) -> None:
        """Top-k must sample from the k most likely tokens in proportion to their probabilities."""
        engine = harness.engine(batch_size=1000)
        results = harness.complete(engine, [SPREAD] * 1000, max_new_tokens=1, temperature=2.0, top_k=3)
        harness.require_frequencies("1000 tokens with top_k=3", results, _shares_of(harness, 3))

    @holds(3)
    def test_top_p_leaves_the_nucleus(self, harness: GenerationHarness) -> None:
        """Top-p must sample from the fewest most likely tokens whose mass reaches top_p, in proportion.

        Here these are three and five: rounded to one decimal, the second top_p would leave four.
        """
        engine = harness.engine(batch_size=1000)
        shares = harness.plain().next(SPREAD, 2.0).exp().topk(5).values
        for count in (3, 5):
            top_p = float(shares[: count - 1].sum() + shares[count - 1] / 2)
            results = harness.complete(engine, [SPREAD] * 1000, max_new_tokens=1, temperature=2.0, top_p=top_p)
            harness.require_frequencies(f"1000 tokens with top_p={top_p:.3f}", results, _shares_of(harness, count))

    @holds(9)
    def test_the_seed_decides(self, harness: GenerationHarness) -> None:
        """Equal seeds must give equal samples, again and beside each other, and every bit of a seed must matter."""
        engine, small = harness.engine(), list(range(8))

        def sample(seeds: list[int]) -> list[list[int]]:
            settings = {"max_new_tokens": 16, "temperature": 1.5, "stop": ()}
            results = harness.complete(engine, [SPREAD] * len(seeds), seeds, **settings)
            return [tokens_of(result) for result in results]

        first = sample(small)
        harness.equal("the same seeds again", sample(small), first)
        harness.equal("each seed twice in one batch", sample([0, 0, 1, 1]), [first[0], first[0], first[1], first[1]])
        seeds = [0, *(1 << bit for bit in range(63)), -1, -2, -(2**62), -(2**63)]
        distinct = len({tuple(tokens) for tokens in sample(seeds)})
        harness.equal("samples of seeds that differ in one bit or in the sign", distinct, len(seeds))


def _shares_of(harness: GenerationHarness, count: int) -> dict[tuple[int, ...], float]:
    """Return the renormalized probabilities of the `count` most likely tokens after `SPREAD` at temperature 2."""
    best, tokens = harness.plain().next(SPREAD, 2.0).exp().topk(count)
    return {(token,): share for token, share in zip(tokens.tolist(), (best / best.sum()).tolist(), strict=True)}


_GRIDS: Sequence[Sequence[tuple[int, int]]] = (((4, 4),), ((4, 4),), ((2, 4), (4, 6)), ())
"""Height and width, in patches, of the images of each prompt. The first two prompts have equal tokens."""


class Images(Suite):
    """Two prompts that differ in their images alone, one with two images, and one without any."""

    @holds(9, Capability.MULTIMODAL)
    def test_prompts_are_completed_with_their_own_images(self, harness: GenerationHarness) -> None:
        """Log-probabilities must be those of plain forwards, each with its own images."""
        path = cases.model("patches_wide_heads", harness.models)
        engine, requests = harness.bare_engine(path=path), _requests()
        harness.update(engine, harness.weights(path), 1)
        engine.submit(requests)
        results, model = harness.collect(engine, requests), cases.load(path, "ImageTextToText")
        _require_logprobs(harness, "each with its images", requests, results, model)

    @holds(10, Capability.MULTIMODAL)
    def test_an_update_covers_the_image_encoder(self, harness: GenerationHarness) -> None:
        """The same after an update that changes the image encoder alone, for images that were seen before it."""
        path = cases.model("patches_wide_heads", harness.models)
        engine, weights = harness.bare_engine(path=path), harness.weights(path)
        harness.update(engine, weights, 1)
        first = _requests()
        engine.submit(first)
        harness.collect(engine, first)
        changed = {name: 1.5 * one if "visual" in name else one for name, one in weights.items()}
        harness.update(engine, changed, 2)
        again, model = _requests(prefix="again"), cases.load(path, "ImageTextToText")
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.mul_(1.5 if "visual" in name else 1.0)
        engine.submit(again)
        _require_logprobs(harness, "with another encoder", again, harness.collect(engine, again), model)


def _requests(prefix: str = "") -> list[GenerationRequest]:
    """Greedy requests; equal ones at each call."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for row, grids in enumerate(_GRIDS):
        tokens = [token for height, width in grids for token in (*[cases.image_token()] * (height * width // 4), 9)]
        media: dict[str, Tensor] = {}
        if grids:
            patches = sum(height * width for height, width in grids)
            media["pixel_values"] = torch.randn(patches, 3 * 2 * 4 * 4, generator=generator)
            media["image_grid_thw"] = torch.tensor([[1, *grid] for grid in grids])
        prompt = torch.tensor([4, *tokens, 7, 3])
        found.append(GenerationRequest(f"{prefix}{row}", prompt, row, 4, SamplingParams(0.0), media=media))
    return found


@torch.no_grad()
def _require_logprobs(
    harness: GenerationHarness,
    what: str,
    requests: Sequence[GenerationRequest],
    results: Sequence[GenerationResult],
    model: Any,
) -> None:
    """Require the log-probabilities of a plain forward of each prompt with its completion and its images."""
    for row, (request, result) in enumerate(zip(requests, results, strict=True)):
        ids, start = torch.cat((request.prompt_ids, result.token_ids)), len(request.prompt_ids)
        types = {"mm_token_type_ids": (ids == cases.image_token()).int()[None]} if request.media else {}
        logits = model(input_ids=ids[None], **request.media, **types, use_cache=False).logits[0]
        every = logits[start - 1 : -1].double().log_softmax(-1)
        wanted = every.gather(1, result.token_ids[:, None])[:, 0]
        harness.values(f"log-probabilities of row {row} ({what})", result.logprobs, wanted)

"""Results: their types, where completions end and why, and the spans of weight versions."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.interfaces.generation import GenerationResult
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.generation.engine_harness import (
    END,
    PLUS,
    POSITIONS,
    PROMPTS,
    GenerationHarness,
    requests_of,
    tokens_of,
)


class Results(Suite):
    """The fields of a `GenerationResult`."""

    @holds(1)
    def test_results_have_their_types_and_are_on_the_cpu(self, harness: GenerationHarness) -> None:
        """Results must have the specified dtypes and shapes and be on the CPU, whatever the engine computes on."""
        for result in harness.complete(harness.engine(), PROMPTS):
            count = len(result.token_ids)
            for name, dtype in (("token_ids", torch.int64), ("logprobs", torch.float32)):
                value = getattr(result, name)
                got = (value.dtype, tuple(value.shape), value.device.type, value.requires_grad)
                harness.equal(f"dtype, shape, device and gradient of {name}", got, (dtype, (count,), "cpu", False))

    @holds(9)
    def test_prompts_are_not_changed(self, harness: GenerationHarness) -> None:
        """The engine must not modify the prompts, which the caller uses again."""
        engine, requests = harness.engine(), requests_of(PROMPTS)
        engine.submit(requests)
        harness.collect(engine, requests)
        got = [request.prompt_ids.tolist() for request in requests]
        harness.equal("the prompts after generating", got, [list(prompt) for prompt in PROMPTS])

    @holds(9)
    def test_completions_end_with_the_stop_tokens_of_their_request(self, harness: GenerationHarness) -> None:
        """Every stop token of a request must end its completion and be part of it, and no other token.

        Requests differ in stop tokens; prompts may contain them.
        """
        engine, plain = harness.engine(), harness.plain()
        every = set(range(len(harness.tokenizer)))
        stops: tuple[set[int], ...] = ({END}, {END, PLUS}, {PLUS}, {END, 2, PLUS}, every, set())
        several = [
            requests_of(PROMPTS, prefix=f"{number}.", max_new_tokens=16, temperature=0.0, stop=stop)
            for number, stop in enumerate(stops)
        ]
        for requests in several:
            engine.submit(requests)
        results = iter(harness.collect(engine, [request for requests in several for request in requests]))
        for stop in stops:
            expected = [plain.greedy(prompt, stop, 16) for prompt in PROMPTS]
            got = [tokens_of(next(results)) for _ in PROMPTS]
            harness.equal(f"completions with the stop tokens {sorted(stop)}", got, expected)

    @holds(9)
    def test_finish_reason_is_length_without_a_stop_token(self, harness: GenerationHarness) -> None:
        """The reason must be "length" without a stop token; one as the last allowed token is still "stop"."""
        results = harness.complete(harness.engine(), PROMPTS, max_new_tokens=8, temperature=0.0)
        ends = [harness.plain().greedy(prompt, {END}, 8)[-1] for prompt in PROMPTS]
        expected = ["stop" if end == END else "length" for end in ends]
        harness.equal("finish_reason", [result.finish_reason for result in results], expected)

    @holds(9)
    def test_no_completion_is_longer_than_its_request_allows(self, harness: GenerationHarness) -> None:
        """Completions must have exactly `max_new_tokens` tokens unless they end earlier, each its own number."""
        engine, most = harness.engine(), (1, 5, 2)
        requests = [
            request for count in most for request in requests_of(PROMPTS, prefix=f"{count}.", max_new_tokens=count)
        ]
        engine.submit(requests)
        for request, result in zip(requests, harness.collect(engine, requests), strict=True):
            tokens = tokens_of(result)
            expected = tokens.index(END) + 1 if END in tokens else request.max_new_tokens
            harness.equal(f"length of the completion of request {request.request_id}", len(tokens), expected)
            harness.require(len(tokens) <= request.max_new_tokens, "completions are not too long", got=len(tokens))

    @holds(9)
    def test_completions_end_at_the_last_position_of_the_model(self, harness: GenerationHarness) -> None:
        """A completion must take the positions that its prompt leaves, and end with the reason "length"."""
        prompts = [([7, 2, 13] * POSITIONS)[: POSITIONS - room] for room in (5, 1)]
        results = harness.complete(harness.engine(), prompts, max_new_tokens=20, temperature=0.0, stop=())
        got = [(len(result.token_ids), result.finish_reason) for result in results]
        harness.equal("length and finish_reason at the last position", got, [(5, "length"), (1, "length")])
        harness.require_greedy("at the last position", prompts, results, harness.plain(), ends=())

    @holds(10)
    def test_spans_cover_all_tokens_with_the_version_of_the_weights(self, harness: GenerationHarness) -> None:
        """Spans must be consecutive, not empty, cover all tokens, and have the version of the weights in use."""
        engine = harness.engine()
        for version in (1, 5):
            if version > 1:
                harness.give(engine, harness.path(1), version)
            for result in harness.complete(engine, PROMPTS, max_new_tokens=6):
                require_spans(harness, result)
                versions = {span.version for span in result.spans}
                harness.equal("versions of a completion", versions, {version})


def require_spans(harness: GenerationHarness, result: GenerationResult) -> None:
    """Require spans that are consecutive, not empty, and cover all tokens."""
    starts = [span.start for span in result.spans]
    ends = [span.end for span in result.spans]
    expected: tuple[Any, ...] = ([0, *ends[:-1]] if ends else [], len(result.token_ids))
    got = (starts, ends[-1] if ends else 0)
    harness.equal("starts of the spans, and the end of the last one", got, expected)
    harness.require(all(start < end for start, end in zip(starts, ends, strict=True)), "spans are not empty")

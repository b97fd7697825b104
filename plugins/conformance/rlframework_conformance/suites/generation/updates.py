"""Weight updates in phases: a version is used as a whole or not at all, also where requests are in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlframework.base.errors import EngineNotReady, RefitError
from rlframework.interfaces.generation import GenerationResult
from rlframework.plugins.types import Capability
from rlframework.policy.lora_math import A, B
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.generation.engine_harness import GenerationHarness, requests_of, specs_of, tokens_of
from rlframework_conformance.suites.generation.requests import LONG
from rlframework_conformance.suites.generation.results import require_spans
from rlframework_conformance.suites.generation.weights import CACHED, samples_with
from rlframework_conformance.suites.plain_decoding import PlainDecoder

_ADAPTED = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
_LATE = "model.layers.1.mlp.up_proj.weight"


class Updates(Suite):
    """`begin_weight_update`, `load_weights`, `finish_weight_update`."""

    @holds(10)
    def test_nothing_is_served_without_weights(self, harness: GenerationHarness) -> None:
        """`poll` with requests must raise `EngineNotReady` before any weights, not use those in the model's directory.

        The requests are served once there are weights.
        """
        engine, requests = harness.bare_engine(), requests_of([[5], [6]], temperature=0.0)
        engine.submit(requests)
        harness.raises(EngineNotReady, partial(engine.poll, 60.0), "poll before any weights")
        harness.update(engine, harness.weights(harness.path(1)), 1)
        results = harness.collect(engine, requests)
        harness.require_greedy("submitted early", [[5], [6]], results, harness.plain(harness.path(1)))

    @holds(10)
    def test_a_part_of_an_update_is_not_used(self, harness: GenerationHarness) -> None:
        """`poll` with requests must raise `EngineNotReady` between the first and the last phase of an update."""
        engine, weights = harness.bare_engine(), harness.weights(harness.path(1))
        harness.update(engine, harness.weights(), 1)
        engine.begin_weight_update(2, specs_of(weights))
        requests = requests_of([[5], [6]], temperature=0.0)
        engine.submit(requests)
        harness.raises(EngineNotReady, partial(engine.poll, 60.0), "poll after begin_weight_update")
        engine.load_weights(weights.items())
        harness.raises(EngineNotReady, partial(engine.poll, 60.0), "poll before finish_weight_update")
        engine.finish_weight_update()
        results = harness.collect(engine, requests)
        harness.require_greedy("after the update", [[5], [6]], results, harness.plain(harness.path(1)))

    @holds(10)
    def test_an_update_can_be_begun_again(self, harness: GenerationHarness) -> None:
        """`begin_weight_update` must discard an update in progress, with what has arrived of it."""
        engine, weights = harness.bare_engine(), harness.weights()
        other = harness.weights(harness.path(1))
        engine.begin_weight_update(1, specs_of(other))
        engine.load_weights(_some(other, 8))
        report = harness.update(engine, weights, 2)
        harness.equal("version of the report", report.version, 2)
        samples_with(harness, "after a second begin", engine, harness.plain())
        engine.begin_weight_update(3, specs_of(other))
        engine.load_weights(_some(other, 8))
        engine.begin_weight_update(4, specs_of(other))
        engine.load_weights(item for item in other.items() if item[0] not in dict(_some(other, 8)))
        harness.raises(RefitError, engine.finish_weight_update, "weights that arrived before begin_weight_update")

    @holds(10)
    def test_weights_that_do_not_arrive_are_named(self, harness: GenerationHarness) -> None:
        """Announced weights that have not arrived must be a `RefitError` that names them, also at a later update."""
        engine, weights = harness.bare_engine(), harness.weights()
        for version in (1, 3):
            engine.begin_weight_update(version, specs_of(weights))
            engine.load_weights(item for item in weights.items() if item[0] != _LATE)
            harness.raises(RefitError, engine.finish_weight_update, f"version {version} without a weight", _LATE)
            _require_recovery(harness, engine, version + 1)

    @holds(10)
    def test_weights_other_than_announced_are_rejected_by_name(self, harness: GenerationHarness) -> None:
        """A weight that was not announced, or comes in another shape or dtype, must be a `RefitError` that names it."""
        engine, weights = harness.bare_engine(), harness.weights()
        narrow = weights[_LATE][:, :-1].contiguous()
        bad = {
            "a weight that was not announced": {"model.extra.weight": torch.zeros(3)},
            "another shape": {_LATE: narrow},
            "another dtype": {_LATE: weights[_LATE].bfloat16()},
        }
        for number, (what, wrong) in enumerate(bad.items()):
            engine.begin_weight_update(2 * number + 1, specs_of(weights))
            (name,) = wrong
            harness.raises(RefitError, partial(engine.load_weights, wrong.items()), what, name)
            _require_recovery(harness, engine, 2 * number + 2)

    @holds(10)
    def test_weights_that_do_not_fit_the_model_are_rejected_by_name(self, harness: GenerationHarness) -> None:
        """Announcing a weight that the model does not have, in a shape that it does not have, or without one that it
        needs must be a `RefitError` that names it, at the latest when the update finishes.
        """
        engine, weights = harness.bare_engine(), harness.weights()
        bad = {
            "a weight too many": {**weights, "model.layers.2.mlp.up_proj.weight": weights[_LATE]},
            "a weight too few": {name: weight for name, weight in weights.items() if name != _LATE},
            "another shape than the model's": {**weights, _LATE: weights[_LATE][:, :-1].contiguous()},
        }
        for number, (what, wrong) in enumerate(bad.items()):
            call = partial(harness.update, engine, wrong, 2 * number + 1)
            harness.raises(RefitError, call, what, "layers.2.mlp.up_proj" if "many" in what else _LATE)
            _require_recovery(harness, engine, 2 * number + 2)

    @holds(10)
    def test_an_update_that_fails_leaves_the_engine_without_weights(self, harness: GenerationHarness) -> None:
        """After a sender that fails half way `poll` must raise `EngineNotReady` until the next complete update.

        Requests that wait are served then, with the new weights.
        """

        def failing(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
            yield from _some(weights, 8)
            raise RuntimeError("the trainer is gone")

        engine, weights = harness.bare_engine(), harness.weights(harness.path(1))
        harness.update(engine, harness.weights(), 1)
        requests = requests_of([[5], [6]], temperature=0.0)
        engine.submit(requests)
        engine.begin_weight_update(2, specs_of(weights))
        harness.raises(RuntimeError, partial(engine.load_weights, failing(weights)), "a failing sender", "is gone")
        harness.raises(EngineNotReady, partial(engine.poll, 60.0), "poll after an update that failed")
        harness.update(engine, weights, 3)
        results = harness.collect(engine, requests)
        harness.require_greedy("after the update", [[5], [6]], results, harness.plain(harness.path(1)))

    @holds(10, Capability.LORA_REFIT)
    def test_adapters_are_added_to_the_weights_of_the_model(self, harness: GenerationHarness) -> None:
        """An update of adapters alone must add each product B A to the weights in the model's directory, not to those
        of the previous update.
        """
        engine, base = harness.bare_engine(), harness.weights()
        for version in (1, 2):
            generator, merged = torch.Generator().manual_seed(version), dict(base)
            adapters: dict[str, Tensor] = {}
            for layer in _ADAPTED:
                rows, columns = base[f"{layer}.weight"].shape
                a, b = torch.randn(2, columns, generator=generator), torch.randn(rows, 2, generator=generator) / 4
                adapters |= {layer + A: a.to(harness.device), layer + B: b.to(harness.device)}
                merged[f"{layer}.weight"] = base[f"{layer}.weight"].cpu() + b @ a
            harness.update(engine, adapters, version)
            decoder = PlainDecoder(harness.path(), {name: weight.cpu() for name, weight in merged.items()})
            samples_with(harness, f"adapters of version {version}", engine, decoder)

    @holds(10, Capability.IN_FLIGHT_UPDATE)
    def test_requests_in_progress_survive_an_update(self, harness: GenerationHarness) -> None:
        """Requests in progress must go on with the new weights; spans tell which tokens are of which version.

        Each token and its log-probability must be of the weights of its span, given all tokens before it.
        """
        _require_both_versions(harness, lambda engine: harness.update(engine, harness.weights(harness.path(1)), 2))

    @holds(10, Capability.IN_FLIGHT_UPDATE, Capability.EMBEDDED_GENERATION)
    def test_requests_in_progress_survive_a_step_of_the_trainer(self, harness: GenerationHarness) -> None:
        """As after an update, requests in progress must go on with the weights of a module that is attached again."""
        _require_both_versions(harness, lambda engine: engine.attach(harness.module(harness.path(1)), 2))


def _require_both_versions(harness: GenerationHarness, update: Callable[[Any], Any]) -> None:
    engine = harness.engine()
    requests = requests_of(CACHED, max_new_tokens=LONG, temperature=0.0, stop=())
    engine.submit(requests[:2])
    for _ in range(3):
        harness.equal(f"requests of {LONG} tokens that finish at once", engine.poll(0.0), [])
    engine.pause("keep")
    update(engine)
    engine.submit(requests[2:])
    engine.resume()
    results = harness.collect(engine, requests)
    decoders = {1: harness.plain(), 2: harness.plain(harness.path(1))}
    for prompt, result, versions in zip(CACHED, results, ((1, 2), (1, 2), (2,)), strict=True):
        require_spans(harness, result)
        harness.equal("versions of the spans", tuple(span.version for span in result.spans), versions)
        _require_greedy_by_span(harness, list(prompt), result, decoders)
    harness.require_logprobs("by the weights of each span", CACHED, results, decoders)


def _require_greedy_by_span(
    harness: GenerationHarness, prompt: list[int], result: GenerationResult, decoders: Mapping[int, PlainDecoder]
) -> None:
    ids = [*prompt, *tokens_of(result)]
    for start, end, version in result.spans:
        first = len(prompt) + start
        wanted = decoders[version].greedy(ids[:first], (), end - start)
        harness.equal(f"tokens {start} to {end} with version {version}", ids[first : len(prompt) + end], wanted)


def _require_recovery(harness: GenerationHarness, engine: Any, version: int) -> None:
    """Require that nothing is served after a failed update, and that the next one works."""
    requests = requests_of([[5], [6]], prefix="waiting.", temperature=0.0)
    engine.submit(requests)
    harness.raises(EngineNotReady, partial(engine.poll, 60.0), "poll after an update that failed")
    harness.update(engine, harness.weights(), version)
    results = harness.collect(engine, requests)
    harness.require_greedy("after the next update", [[5], [6]], results, harness.plain())


def _some(weights: Mapping[str, Tensor], count: int) -> list[tuple[str, Tensor]]:
    return list(weights.items())[:count]

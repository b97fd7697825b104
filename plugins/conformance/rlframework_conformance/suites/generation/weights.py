"""Which weights are used: attached ones are live, loaded ones are those received last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlframework.plugins.types import Capability
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.generation.engine_harness import (
    END,
    PROMPTS,
    GenerationHarness,
    requests_of,
    specs_of,
    tokens_of,
)
from rlframework_conformance.suites.plain_decoding import PlainDecoder

CACHED = ([7, 2, 13] * 12, [*[7, 2, 13] * 12, 5], [3, 9, 4, 12] * 17)
"""Prompts with a long common prefix, which caches hold; longer than one and two blocks of 32 tokens."""

_SESSIONS = 32
"""Sessions, each of a turn: with one stale session in four none of them is among these with a chance of 1e-4."""

_MANY = 12
"""Tokens of completions for which an engine may prepare copies of weights, which an update must renew."""


class Weights(Suite):
    """`attach`, weight updates, and the memory of weights and caches."""

    @holds(6, Capability.EMBEDDED_GENERATION)
    def test_attached_weights_are_live(self, harness: GenerationHarness) -> None:
        """Attached weights must be used without a copy: changes of the trainer's module take effect."""
        module = harness.module()
        engine = harness.bare_engine()
        engine.attach(module, 1)
        samples_with(harness, "the attached weights", engine, harness.plain(), max_new_tokens=_MANY)
        _copy_into(module, harness.module(harness.path(1)))
        engine.attach(module, 2)
        changed = harness.plain(harness.path(1))
        samples_with(harness, "weights changed in place", engine, changed, max_new_tokens=_MANY)

    @holds(6, Capability.EMBEDDED_GENERATION)
    def test_weights_given_last_count_however_they_came(self, harness: GenerationHarness) -> None:
        """The weights given last must be used, whether attached or loaded."""
        engine = harness.bare_engine()
        loaded, other = harness.weights(harness.path(1)), harness.plain(harness.path(1))
        harness.update(engine, loaded, 1)
        engine.attach(harness.module(), 2)
        samples_with(harness, "a module attached after weights were loaded", engine, harness.plain())
        harness.update(engine, loaded, 3)
        samples_with(harness, "weights loaded after a module was attached", engine, other)

    @holds(6)
    def test_the_weights_of_the_last_update_count(self, harness: GenerationHarness) -> None:
        """Each update must replace the weights of the previous one, regardless of the files in the model's directory.

        The report has the version.
        """
        engine = harness.bare_engine()
        for version, seed in enumerate((1, 0, 1)):
            path = harness.path(seed)
            report = harness.update(engine, harness.weights(path), version)
            harness.equal("version of the report", report.version, version)
            samples_with(harness, f"update {version}", engine, harness.plain(path), max_new_tokens=_MANY)

    @holds(6)
    def test_every_tensor_of_an_update_arrives(self, harness: GenerationHarness) -> None:
        """Every tensor must be updated, in its place, orientation and precision; one tensor at a time is changed.

        Tested with a tied head, which follows the embeddings, and with one of its own.
        """
        for path in (harness.path(), harness.path(tied=False)):
            engine, weights = harness.bare_engine(path=path), harness.weights(path)
            harness.update(engine, weights, 0)
            names = sorted(weights) if path == harness.path() else ["lm_head.weight", "model.embed_tokens.weight"]
            for version, name in enumerate(names, start=1):
                changed = {**weights, name: weights[name] * 1.5 + 0.1}
                harness.update(engine, changed, version)
                decoder = PlainDecoder(path, {key: tensor.cpu() for key, tensor in changed.items()})
                samples_with(harness, f"{name} changed", engine, decoder, PROMPTS[1:3])

    @holds(6)
    def test_weights_may_come_one_by_one_and_be_reused_by_the_sender(self, harness: GenerationHarness) -> None:
        """`load_weights` must copy each tensor before requesting the next one, and may be called several times.

        The sender gathers all tensors into the same buffer.
        """
        engine, path = harness.bare_engine(), harness.path(1)

        def stream(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights.items():
                yield name, tensor
                tensor.zero_()

        for version in range(2):
            given = harness.weights(path)
            engine.begin_weight_update(version, specs_of(given))
            names = list(given)
            for part in (names[:5], names[5:]):
                engine.load_weights(stream({name: given[name] for name in part}))
            engine.finish_weight_update()
            samples_with(harness, "streamed weights", engine, harness.plain(path))

    @holds(10)
    def test_nothing_computed_with_older_weights_is_used(self, harness: GenerationHarness) -> None:
        """Prefixes cached with earlier weights must not be used, whether the prompts are equal or of one session."""
        engine = harness.engine()
        for version, seed in enumerate((0, 1, 0), start=1):
            path = harness.path(seed)
            harness.give(engine, path, version)
            for what in ("first", "again"):  # the second time from the cache
                options = {"session": True, "max_new_tokens": _MANY}
                samples_with(harness, f"version {version}, {what}", engine, harness.plain(path), CACHED, **options)

    @holds(10)
    def test_every_session_uses_the_weights_of_the_last_update(self, harness: GenerationHarness) -> None:
        """Requests of many sessions, each with its own id, must be completed with the weights given last."""
        engine, prompt = harness.engine(), CACHED[0]
        expected = {
            version: harness.plain(harness.path(seed)).greedy(prompt, {END}, 4) for version, seed in ((1, 0), (2, 1))
        }
        for version in expected:
            if version == 2:
                harness.give(engine, harness.path(1), 2)
            (request,) = requests_of([prompt], temperature=0.0)
            requests = [
                replace(request, request_id=f"{number}", session_id=f"{number * 0x9E3779B9:032x}:session:{number}")
                for number in range(_SESSIONS)
            ]
            engine.submit(requests)
            for request, result in zip(requests, harness.collect(engine, requests), strict=True):
                what = f"completion of session {request.session_id} with version {version}"
                harness.equal(what, tokens_of(result), expected[version])

    @holds(4, Capability.EMBEDDED_GENERATION)
    def test_generating_leaves_the_module_as_it_was(self, harness: GenerationHarness) -> None:
        """Generation must leave the module's modes, weights and `requires_grad` unchanged, and a backward must still
        work.
        """
        module = harness.module()
        module.model.layers[1].eval()
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        modes = [part.training for part in module.modules()]
        engine = harness.bare_engine()
        engine.attach(module, 1)
        harness.complete(engine, PROMPTS)
        harness.equal("training modes of the modules", [part.training for part in module.modules()], modes)
        harness.same("after generating", module.state_dict(), before)
        trained = [parameter.requires_grad for parameter in module.parameters()]
        harness.require(all(trained), "parameters that were trained still are", got=trained)
        loss = module(input_ids=torch.tensor([[3, 4]], device=harness.device)).logits.sum()
        loss.backward()
        harness.require(module.model.norm.weight.grad is not None, "a backward works after generating")

    @holds(10)
    def test_memory_can_be_released_between_rollouts(self, harness: GenerationHarness) -> None:
        """Without the cache's memory the engine must keep its weights; without that of weights, it works again after
        an update. Both calls return bytes.
        """
        engine, weights = harness.engine(), harness.weights()
        samples_with(harness, "before", engine, harness.plain())
        _release(harness, engine, ("kv_cache",))
        samples_with(harness, "after the cache was released", engine, harness.plain())
        _release(harness, engine, ("weights", "kv_cache"))
        harness.update(engine, weights, 2)
        samples_with(harness, "after an update", engine, harness.plain())


def samples_with(
    harness: GenerationHarness,
    what: str,
    engine: Any,
    decoder: PlainDecoder,
    prompts: Any = PROMPTS[:5],
    **options: Any,
) -> None:
    """Require greedy completions of 4 tokens and their log-probabilities to be the plain decoder's."""
    results = harness.complete(engine, prompts, temperature=0.0, **options)
    harness.require_greedy(what, prompts, results, decoder)


def _release(harness: GenerationHarness, engine: Any, tags: tuple[str, ...]) -> None:
    for name in ("release", "restore"):
        size = getattr(engine, name)(tags)
        harness.require(isinstance(size, int) and size >= 0, f"{name} returns bytes", got=size)


@torch.no_grad()
def _copy_into(module: Any, other: Any) -> None:
    for parameter, source in zip(module.parameters(), other.parameters(), strict=True):
        parameter.copy_(source)

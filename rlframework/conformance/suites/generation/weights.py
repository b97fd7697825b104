"""Which weights are sampled with: attached ones are live, loaded ones are those received last."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.generation.harness import END, PROMPTS, GenerationHarness, rows_of
from rlframework.conformance.suites.plain_decoding import PlainDecoder
from rlframework.errors import UserError

_MOST = 4
_PROMPTS = PROMPTS[:5]


class Weights(Suite):
    """`attach`, `load_weights`, and the calls between rollouts."""

    @holds(6)
    def test_attached_weights_are_live(self, harness: GenerationHarness) -> None:
        """Attached weights must be used live: changes of the trainer's module in place take effect."""
        module = harness.module()
        engine = harness.engine(module=module, max_new_tokens=_MOST)
        _samples_with(harness, "the attached weights", engine, harness.plain())
        _copy_into(module, harness.module(harness.path(1)))
        _samples_with(harness, "weights changed in place", engine, harness.plain(harness.path(1)))

    @holds(6)
    def test_loaded_weights_are_sampled_with(self, harness: GenerationHarness) -> None:
        """Loaded weights must be used, regardless of the files in the model's directory."""
        engine = harness.bare_engine(max_new_tokens=_MOST)
        engine.load_weights(harness.weights(1).items())
        _samples_with(harness, "loaded weights", engine, harness.plain(harness.path(1)))

    @holds(6)
    def test_the_weights_of_the_last_refit_count(self, harness: GenerationHarness) -> None:
        """Each refit must replace the weights of the previous one."""
        engine = harness.bare_engine(max_new_tokens=_MOST)
        for step, seed in enumerate((0, 1, 0)):
            engine.load_weights(harness.weights(seed).items())
            _samples_with(harness, f"refit {step + 1}", engine, harness.plain(harness.path(seed)))

    @holds(6)
    def test_weights_given_last_count_however_they_came(self, harness: GenerationHarness) -> None:
        """The weights given last must be used, whether attached or loaded."""
        engine = harness.bare_engine(max_new_tokens=_MOST)
        engine.load_weights(harness.weights(1).items())
        engine.attach(harness.module())
        _samples_with(harness, "a module attached after weights were loaded", engine, harness.plain())
        engine.load_weights(harness.weights(1).items())
        _samples_with(harness, "weights loaded after a module was attached", engine, harness.plain(harness.path(1)))

    @holds(6)
    def test_every_tensor_of_a_refit_arrives(self, harness: GenerationHarness) -> None:
        """Every tensor must be updated by a refit; one tensor at a time is changed."""
        engine, weights = harness.bare_engine(max_new_tokens=_MOST), harness.weights()
        engine.load_weights(weights.items())
        for name in sorted(weights):
            changed = {**weights, name: weights[name] * 1.5 + 0.1}
            engine.load_weights(changed.items())
            output = engine.generate(rows_of(_PROMPTS), greedy=True)
            decoder = PlainDecoder(harness.path(), {key: tensor.cpu() for key, tensor in changed.items()})
            harness.require_logprobs(f"{name} changed", output, decoder, 1.0)

    @holds(6)
    def test_weights_may_come_one_by_one_and_be_reused_by_the_sender(self, harness: GenerationHarness) -> None:
        """`load_weights` must copy each tensor before requesting the next one.

        The sender gathers all tensors into the same buffer.
        """
        engine = harness.bare_engine(max_new_tokens=_MOST)
        given = harness.weights(1)

        def stream() -> Any:
            for name, tensor in given.items():
                yield name, tensor
                tensor.zero_()

        for _ in range(2):
            given = harness.weights(1)
            engine.load_weights(stream())
            _samples_with(harness, "streamed weights", engine, harness.plain(harness.path(1)))

    @holds(8)
    def test_missing_weights_are_refused_by_name(self, harness: GenerationHarness) -> None:
        """A missing weight must raise an error that names it, at the first refit and at later ones."""
        engine, weights = harness.bare_engine(max_new_tokens=_MOST), harness.weights()
        name = "model.layers.1.mlp.up_proj.weight"
        partial = {key: tensor for key, tensor in weights.items() if key != name}
        harness.raises(UserError, lambda: engine.load_weights(partial.items()), "a first refit without a name", name)
        engine.load_weights(weights.items())
        harness.raises(UserError, lambda: engine.load_weights(partial.items()), "a later refit without a name", name)

    @holds(8)
    def test_generating_without_weights_is_refused(self, harness: GenerationHarness) -> None:
        """`generate` before any weights must raise a `UserError`, not use those in the model's directory."""
        engine = harness.bare_engine(max_new_tokens=_MOST)
        harness.raises(UserError, lambda: engine.generate(rows_of(PROMPTS)), "generate before any weights", "weights")

    @holds(4)
    def test_generating_leaves_the_module_as_it_was(self, harness: GenerationHarness) -> None:
        """Generation must leave the module's modes, weights and `requires_grad` unchanged, and a backward must still
        work.
        """
        module = harness.module()
        module.model.layers[1].eval()
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        modes = [part.training for part in module.modules()]
        harness.engine(module=module, max_new_tokens=_MOST).generate(rows_of(PROMPTS))
        harness.equal("training modes of the modules", [part.training for part in module.modules()], modes)
        for name, tensor in module.state_dict().items():
            harness.exact(f"{name} after generating", tensor, before[name])
        trained = [parameter.requires_grad for parameter in module.parameters()]
        harness.require(all(trained), "parameters that were trained still are", got=trained)
        loss = module(input_ids=torch.tensor([[3, 4]], device=harness.device)).logits.sum()
        loss.backward()
        harness.require(module.model.norm.weight.grad is not None, "a backward works after generating")

    @holds(6)
    def test_generation_goes_on_after_it_was_finished(self, harness: GenerationHarness) -> None:
        """`finish_generation` must free caches only, so that the next rollout works; both calls return True."""
        for engine in (harness.engine(max_new_tokens=_MOST), harness.bare_engine(max_new_tokens=_MOST)):
            engine.load_weights(harness.weights().items())
            for rollout in (1, 2):
                harness.require(engine.prepare_for_generation() is True, "prepare_for_generation returns True")
                _samples_with(harness, f"rollout {rollout}", engine, harness.plain())
                harness.require(engine.finish_generation() is True, "finish_generation returns True")


def _samples_with(harness: GenerationHarness, what: str, engine: Any, decoder: PlainDecoder) -> None:
    """Require greedy completions of `_MOST` tokens and their log-probabilities to be the plain decoder's."""
    output = engine.generate(rows_of(_PROMPTS), greedy=True)
    harness.require_logprobs(what, output, decoder, 1.0)
    expected = [decoder.greedy(prompt, {END}, _MOST) for prompt in _PROMPTS]
    harness.require_completions(what, output, _PROMPTS, expected)


@torch.no_grad()
def _copy_into(module: Any, other: Any) -> None:
    for parameter, source in zip(module.parameters(), other.parameters(), strict=True):
        parameter.copy_(source)

"""Which weights it samples with: attached ones are live, loaded ones are the last that were given."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.generation.workbench import END, PROMPTS, GenerationBench, rows_of
from rlframework.conformance.suites.plain_decoding import PlainDecoder
from rlframework.errors import UserError

_MOST = 4
_PROMPTS = PROMPTS[:5]


class Weights(Suite):
    """`attach`, `load_weights`, and what lies between rollouts."""

    @holds(6)
    def test_attached_weights_are_live(self, bench: GenerationBench) -> None:
        """The trainer changes its module in place; no copy of it may be sampled with."""
        module = bench.module()
        engine = bench.engine(module=module, max_new_tokens=_MOST)
        _samples_with(bench, "the attached weights", engine, bench.plain())
        _copy_into(module, bench.module(bench.path(1)))
        _samples_with(bench, "weights changed in place", engine, bench.plain(bench.path(1)))

    @holds(6)
    def test_loaded_weights_are_sampled_with(self, bench: GenerationBench) -> None:
        """They are given in full: what lies in the model's directory does not matter."""
        engine = bench.bare_engine(max_new_tokens=_MOST)
        engine.load_weights(bench.weights(1).items())
        _samples_with(bench, "loaded weights", engine, bench.plain(bench.path(1)))

    @holds(6)
    def test_the_weights_of_the_last_refit_count(self, bench: GenerationBench) -> None:
        """Every step brings new ones."""
        engine = bench.bare_engine(max_new_tokens=_MOST)
        for step, seed in enumerate((0, 1, 0)):
            engine.load_weights(bench.weights(seed).items())
            _samples_with(bench, f"refit {step + 1}", engine, bench.plain(bench.path(seed)))

    @holds(6)
    def test_weights_given_last_count_however_they_came(self, bench: GenerationBench) -> None:
        """Loaded, then a module attached, then loaded again."""
        engine = bench.bare_engine(max_new_tokens=_MOST)
        engine.load_weights(bench.weights(1).items())
        engine.attach(bench.module())
        _samples_with(bench, "a module attached after weights were loaded", engine, bench.plain())
        engine.load_weights(bench.weights(1).items())
        _samples_with(bench, "weights loaded after a module was attached", engine, bench.plain(bench.path(1)))

    @holds(6)
    def test_every_tensor_of_a_refit_arrives(self, bench: GenerationBench) -> None:
        """One tensor is changed a refit, so that none can stay behind unseen."""
        engine, weights = bench.bare_engine(max_new_tokens=_MOST), bench.weights()
        engine.load_weights(weights.items())
        for name in sorted(weights):
            changed = {**weights, name: weights[name] * 1.5 + 0.1}
            engine.load_weights(changed.items())
            output = engine.generate(rows_of(_PROMPTS), greedy=True)
            decoder = PlainDecoder(bench.path(), {key: tensor.cpu() for key, tensor in changed.items()})
            bench.require_logprobs(f"{name} changed", output, decoder, 1.0)

    @holds(6)
    def test_weights_may_come_one_by_one_and_be_reused_by_the_sender(self, bench: GenerationBench) -> None:
        """They are gathered tensor by tensor into a buffer that the next one overwrites: no reference may be kept."""
        engine = bench.bare_engine(max_new_tokens=_MOST)
        given = bench.weights(1)

        def stream() -> Any:
            for name, tensor in given.items():
                yield name, tensor
                tensor.zero_()

        for _ in range(2):
            given = bench.weights(1)
            engine.load_weights(stream())
            _samples_with(bench, "streamed weights", engine, bench.plain(bench.path(1)))

    @holds(8)
    def test_missing_weights_are_refused_by_name(self, bench: GenerationBench) -> None:
        """At the first refit and at later ones; the rest may not be made up or kept from before."""
        engine, weights = bench.bare_engine(max_new_tokens=_MOST), bench.weights()
        name = "model.layers.1.mlp.up_proj.weight"
        partial = {key: tensor for key, tensor in weights.items() if key != name}
        bench.refuses(UserError, lambda: engine.load_weights(partial.items()), "a first refit without a name", name)
        engine.load_weights(weights.items())
        bench.refuses(UserError, lambda: engine.load_weights(partial.items()), "a later refit without a name", name)

    @holds(8)
    def test_generating_without_weights_is_refused(self, bench: GenerationBench) -> None:
        """Not done with those of the model's directory: the trainer's may be others by now."""
        engine = bench.bare_engine(max_new_tokens=_MOST)
        bench.refuses(UserError, lambda: engine.generate(rows_of(PROMPTS)), "generate before any weights", "weights")

    @holds(4)
    def test_generating_leaves_the_module_as_it_was(self, bench: GenerationBench) -> None:
        """The mode of each of its modules, its weights, which of them are trained, and that they can be."""
        module = bench.module()
        module.model.layers[1].eval()
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        modes = [part.training for part in module.modules()]
        bench.engine(module=module, max_new_tokens=_MOST).generate(rows_of(PROMPTS))
        bench.equal("training modes of the modules", [part.training for part in module.modules()], modes)
        for name, tensor in module.state_dict().items():
            bench.exact(f"{name} after generating", tensor, before[name])
        trained = [parameter.requires_grad for parameter in module.parameters()]
        bench.require(all(trained), "parameters that were trained still are", got=trained)
        loss = module(input_ids=torch.tensor([[3, 4]], device=bench.device)).logits.sum()
        loss.backward()
        bench.require(module.model.norm.weight.grad is not None, "a backward works after generating")

    @holds(6)
    def test_generation_goes_on_after_it_was_finished(self, bench: GenerationBench) -> None:
        """`finish_generation` frees caches, not weights; both calls say that all is well."""
        for engine in (bench.engine(max_new_tokens=_MOST), bench.bare_engine(max_new_tokens=_MOST)):
            engine.load_weights(bench.weights().items())
            for rollout in (1, 2):
                bench.require(engine.prepare_for_generation() is True, "prepare_for_generation returns True")
                _samples_with(bench, f"rollout {rollout}", engine, bench.plain())
                bench.require(engine.finish_generation() is True, "finish_generation returns True")


def _samples_with(bench: GenerationBench, what: str, engine: Any, decoder: PlainDecoder) -> None:
    """Greedy answers of an engine for `_MOST` tokens, and their log-probabilities, are those of the plain decoder."""
    output = engine.generate(rows_of(_PROMPTS), greedy=True)
    bench.require_logprobs(what, output, decoder, 1.0)
    expected = [decoder.greedy(prompt, {END}, _MOST) for prompt in _PROMPTS]
    bench.require_completions(what, output, _PROMPTS, expected)


@torch.no_grad()
def _copy_into(module: Any, other: Any) -> None:
    for parameter, source in zip(module.parameters(), other.parameters(), strict=True):
        parameter.copy_(source)

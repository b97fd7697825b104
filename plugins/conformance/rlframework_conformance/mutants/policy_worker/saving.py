"""Violations of contracts 5 and 6: the saved or generating weights are not the trained ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlframework.base.errors import WriteError
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.policy.engine import Engine
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import around, mutant, together
from rlframework_conformance.mutants.policy_worker.engine_access import change_weights, to_bfloat16

DATA = Layout(data=2)


@around(Engine.build)
def _keep_the_start(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    engine.start = engine.snapshot()


@around(PolicyWorker.save_pretrained)
def _save_the_start(call: Any, worker: Any, path: str) -> None:
    current = worker.engine.snapshot()
    worker.engine.restore(worker.engine.start)
    call(path)
    worker.engine.restore(current)


saves_the_weights_of_the_start = mutant(
    "saves_the_weights_of_the_start", "Saving writes the initial weights instead of the trained ones."
)(together(_keep_the_start, _save_the_start))


@mutant("one_tensor_not_saved", "The final norm is missing from the saved model.")
@around(Engine.gather_weights)
def _one_tensor_not_saved(call: Any, engine: Any, names: Any) -> Any:
    return ((name, weight) for name, weight in call(names) if name != "model.norm.weight")


@mutant("saved_in_bfloat16", "Weights are saved in bfloat16.")
@around(Engine.gather_weights)
def _saved_in_bfloat16(call: Any, engine: Any, names: Any) -> Any:
    return ((name, weight.to(torch.bfloat16)) for name, weight in call(names))


@mutant("saving_rounds_weights", "Saving rounds the live weights to bfloat16.")
@around(PolicyWorker.save_pretrained)
def _saving_rounds_weights(call: Any, worker: Any, path: str) -> None:
    call(path)
    change_weights(worker.engine, to_bfloat16)


def _stale_in_a_refit(fragment: str) -> Callable[[Any], Any]:
    """Break refits: weights whose names contain `fragment` stay as they were when first gathered.

    Generation gets a copy of the weights in any layout, also where the engine could give it the live module.
    """

    @around(Engine.gather_weights)
    def gather_weights(call: Any, engine: Any, names: Any) -> Any:
        first: dict[str, Tensor] = vars(engine).setdefault("first", {})
        for name, weight in call(names):
            yield name, first.setdefault(name, weight.clone()) if fragment in name else weight

    return together(around(Engine.whole_model)(lambda call, engine: None), gather_weights)


stale_weights = mutant("stale_weights_after_refit", "The engine keeps the weights of the first refit.", layout=DATA)(
    _stale_in_a_refit("")
)

one_tensor_stale = mutant("one_tensor_skipped_in_refit", "A refit does not update one of the norms.", layout=DATA)(
    _stale_in_a_refit("layers.0.input_layernorm")
)


@around(PolicyWorker.use_reference_model)
@contextmanager
def _leave_the_reference(call: Any, worker: Any) -> Any:
    vars(worker).pop("policy_weights", None)
    current = worker.engine.snapshot()
    worker.engine.restore(worker.scoring.reference.weights)
    yield
    worker.policy_weights = current


@around(PolicyWorker.train, PolicyWorker.get_logprobs)
def _restore_the_policy(call: Any, worker: Any, *args: Any, **options: Any) -> Any:
    if (weights := vars(worker).pop("policy_weights", None)) is not None:
        worker.engine.restore(weights)
    return call(*args, **options)


reference_left_for_generation = mutant(
    "reference_left_for_generation", "The policy's weights are restored only at the next training or scoring call."
)(together(_leave_the_reference, _restore_the_policy))


@mutant("generating_rounds_weights", "Generation rounds the live weights to bfloat16.")
@around(PolicyWorker.exchange)
def _generating_rounds_weights(call: Any, worker: Any, *args: Any, **options: Any) -> Any:
    incoming = call(*args, **options)
    change_weights(worker.engine, to_bfloat16)
    return incoming


@mutant("seeds_by_place", "Samples are drawn by row index instead of by seed.")
@around(PolicyWorker.exchange)
def _seeds_by_place(call: Any, worker: Any, requests: Any, *args: Any, **options: Any) -> Any:
    return call([replace(request, seed=row) for row, request in enumerate(requests)], *args, **options)


@mutant("saving_fails_in_silence", "A failed save raises no error.")
@around(PolicyWorker.save_pretrained)
def _saving_fails_in_silence(call: Any, worker: Any, path: str) -> None:
    with suppress(WriteError):
        call(path)


@mutant("greedy_samples", "Greedy generation samples.")
@around(PolicyWorker.exchange)
def _greedy_samples(call: Any, worker: Any, requests: Any, *args: Any, **options: Any) -> Any:
    sampled = [replace(each, sampling=replace(each.sampling, temperature=1.0)) for each in requests]
    return call(sampled, *args, **options)

"""Violations of contracts 5 and 6: the saved or generating weights are not the trained ones."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from rlframework.base.errors import WriteError
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import change_weights, in_engine, to_bfloat16

DATA = Layout(data=2)


def _broken_weights(change: Any) -> Any:
    """Break `gather_weights`: each weight becomes `change(name, weight)`; None omits it."""

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def gather_weights(self, names: Any) -> Any:
                for name, weight in super().gather_weights(names):
                    changed = change(name, weight)
                    if changed is not None:
                        yield name, changed

        return Broken

    return break_it


def _stale_in_a_refit(fragment: str) -> Any:
    """Break refits: weights whose names contain `fragment` stay as they were when first gathered.

    Generation gets a copy of the weights in any layout, also where the engine could give it the live module.
    """

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def whole_model(self) -> None:
                return None

            def gather_weights(self, names: Any) -> Any:
                kept = self.__dict__.setdefault("kept", {})
                for name, weight in super().gather_weights(names):
                    yield name, kept.setdefault(name, weight.clone()) if fragment in name else weight

        return Broken

    return break_it


@mutant(
    "saves_the_weights_of_the_start",
    "Saving writes the initial weights instead of the trained ones.",
    "test_a_saved_model_is_the_trained_one",
    "test_a_saved_model_goes_on",
)
def saves_the_weights_of_the_start(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.start = self.engine.snapshot()

        def save_pretrained(self, path: str) -> None:
            current = self.engine.snapshot()
            self.engine.restore(self.start)
            super().save_pretrained(path)
            self.engine.restore(current)

    return Broken


one_tensor_not_saved = mutant(
    "one_tensor_not_saved",
    "The final norm is missing from the saved model.",
    "test_saved_names_shapes_and_dtypes_are_those_of_the_model",
    "test_a_saved_model_is_the_trained_one",
)(_broken_weights(lambda name, weight: None if name == "model.norm.weight" else weight))

saved_in_bfloat16 = mutant(
    "saved_in_bfloat16",
    "Weights are saved in bfloat16.",
    "test_saved_names_shapes_and_dtypes_are_those_of_the_model",
    "test_a_saved_model_goes_on",
)(_broken_weights(lambda name, weight: weight.to(torch.bfloat16)))


@mutant("saving_rounds_weights", "Saving rounds the live weights to bfloat16.", "test_saving_changes_nothing")
def saving_rounds_weights(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def save_pretrained(self, path: str) -> None:
            super().save_pretrained(path)
            change_weights(self.engine, to_bfloat16)

    return Broken


stale_weights = mutant(
    "stale_weights_after_refit",
    "The engine keeps the weights of the first refit.",
    "test_generation_uses_the_weights_of_now",
    layout=DATA,
)(_stale_in_a_refit(""))

one_tensor_stale = mutant(
    "one_tensor_skipped_in_refit",
    "A refit does not update one of the norms.",
    "test_generation_uses_the_weights_of_now",
    layout=DATA,
)(_stale_in_a_refit("layers.0.input_layernorm"))


@mutant(
    "reference_left_for_generation",
    "The policy's weights are restored only at the next training or scoring call.",
    "test_generation_after_the_reference_uses_the_policys_weights",
)
def reference_left_for_generation(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        policy_weights: Any = None
        inside = False

        @contextmanager
        def use_reference_model(self) -> Any:
            current = self.engine.snapshot()
            self.engine.restore(self.scoring.reference.weights)
            self.inside = True
            yield
            self.policy_weights, self.inside = current, False

        def _restore_policy(self) -> None:
            if self.policy_weights is not None and not self.inside:
                self.engine.restore(self.policy_weights)
                self.policy_weights = None

        def train(self, *args: Any, **kwargs: Any) -> Any:
            self._restore_policy()
            return super().train(*args, **kwargs)

        def get_logprobs(self, *args: Any, **kwargs: Any) -> Any:
            self._restore_policy()
            return super().get_logprobs(*args, **kwargs)

    return Broken


@mutant(
    "generating_rounds_weights", "Generation rounds the live weights to bfloat16.", "test_generating_changes_nothing"
)
def generating_rounds_weights(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def exchange(self, *args: Any, **kwargs: Any) -> Any:
            incoming = super().exchange(*args, **kwargs)
            change_weights(self.engine, to_bfloat16)
            return incoming

    return Broken


@mutant(
    "seeds_by_place",
    "Samples are drawn by row index instead of by seed.",
    "test_generation_is_the_same_however_rows_are_shared",
)
def seeds_by_place(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def exchange(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            numbered = [replace(request, seed=row) for row, request in enumerate(requests)]
            return super().exchange(numbered, *args, **kwargs)

    return Broken


@mutant("saving_fails_in_silence", "A failed save raises no error.", "test_saving_where_it_cannot_is_an_error")
def saving_fails_in_silence(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def save_pretrained(self, path: str) -> None:
            try:
                super().save_pretrained(path)
            except WriteError:
                return

    return Broken


@mutant("greedy_samples", "Greedy generation samples.", "test_greedy_generation_takes_the_likeliest_tokens")
def greedy_samples(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def exchange(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            sampled = [replace(each, sampling=replace(each.sampling, temperature=1.0)) for each in requests]
            return super().exchange(sampled, *args, **kwargs)

    return Broken

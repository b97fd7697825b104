"""Bugs against contracts 5 and 6: what is saved or generated with is not what was trained."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.conformance.layouts import Layout
from rlframework.conformance.mutants.mutant import mutant
from rlframework.conformance.mutants.policy_worker.engine_access import change_weights, to_bfloat16
from rlframework.errors import UserError

TWO = Layout(data=2)


def _gathered(change: Any) -> Any:
    """A worker whose `gather_weights` yields what `change(worker, name, weight)` makes of each; None: left out."""

    def break_it(worker_class: Any) -> Any:
        class Broken(worker_class):  # type: ignore[misc]
            def gather_weights(self, names: Any) -> Any:
                for name, weight in super().gather_weights(names):
                    changed = change(self, name, weight)
                    if changed is not None:
                        yield name, changed

        return Broken

    return break_it


def _kept_from_the_start(worker: Any, name: str, weight: torch.Tensor, only: str) -> torch.Tensor:
    """The weight as it was when it was first gathered, for names with `only` in them."""
    kept = worker.__dict__.setdefault("kept", {})
    if only not in name:
        return weight
    return kept.setdefault(name, weight.clone())  # type: ignore[no-any-return]


@mutant(
    "saves_the_weights_of_the_start",
    "what is saved is what was loaded",
    "test_a_saved_model_is_the_trained_one",
    "test_a_saved_model_goes_on",
)
def saves_the_weights_of_the_start(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.start = {name: weight.clone() for name, weight in self.gather_weights(self.weight_specs())}

        def save_pretrained(self, path: str) -> None:
            current = self.snapshot()
            self.restore(self.start)
            super().save_pretrained(path)
            self.restore(current)

    return Broken


names_of_its_own = mutant(
    "one_tensor_not_saved",
    "the last norm is missing from what is saved",
    "test_saved_names_shapes_and_dtypes_are_those_of_the_model",
    "test_a_saved_model_is_the_trained_one",
)(_gathered(lambda worker, name, weight: None if name == "model.norm.weight" else weight))

saved_in_bfloat16 = mutant(
    "saved_in_bfloat16",
    "weights are saved in bfloat16",
    "test_saved_names_shapes_and_dtypes_are_those_of_the_model",
    "test_a_saved_model_goes_on",
)(_gathered(lambda worker, name, weight: weight.to(torch.bfloat16)))


@mutant("saving_rounds_weights", "saving casts the live weights", "test_saving_changes_nothing")
def saving_rounds_weights(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def save_pretrained(self, path: str) -> None:
            super().save_pretrained(path)
            change_weights(self, to_bfloat16)

    return Broken


stale_weights = mutant(
    "stale_weights_after_refit",
    "after the first refit the engine keeps what it has",
    "test_generation_uses_the_weights_of_now",
    layout=TWO,
)(_gathered(lambda worker, name, weight: _kept_from_the_start(worker, name, weight, "")))

one_tensor_stale = mutant(
    "one_tensor_skipped_in_refit",
    "one norm is left behind when the engine is refitted",
    "test_generation_uses_the_weights_of_now",
    layout=TWO,
)(_gathered(lambda worker, name, weight: _kept_from_the_start(worker, name, weight, "layers.0.input_layernorm")))


@mutant(
    "reference_left_for_generation",
    "the policy's weights come back only when they are next trained or scored",
    "test_generation_after_the_reference_uses_the_policys_weights",
)
def reference_left_for_generation(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        waiting: Any = None
        inside = False

        @contextmanager
        def use_reference_model(self) -> Any:
            current = self.snapshot()
            self.restore(self._reference)
            self.inside = True
            yield
            self.waiting, self.inside = current, False

        def _come_back(self) -> None:
            if self.waiting is not None and not self.inside:
                self.restore(self.waiting)
                self.waiting = None

        def train(self, *args: Any, **kwargs: Any) -> Any:
            self._come_back()
            return super().train(*args, **kwargs)

        def get_logprobs(self, *args: Any, **kwargs: Any) -> Any:
            self._come_back()
            return super().get_logprobs(*args, **kwargs)

    return Broken


@mutant("generating_rounds_weights", "the engine casts the live weights", "test_generating_changes_nothing")
def generating_rounds_weights(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            output = super().generate(*args, **kwargs)
            change_weights(self, to_bfloat16)
            return output

    return Broken


@mutant(
    "seeds_by_place",
    "samples are drawn by the place of a row, not by its seed",
    "test_generation_is_the_same_however_rows_are_shared",
)
def seeds_by_place(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def generate(self, data: Any, greedy: bool = False) -> Any:
            return super().generate(BatchedDataDict({**data, "seeds": torch.arange(data.size)}), greedy)

    return Broken


@mutant(
    "saving_fails_in_silence", "a model that cannot be saved is a warning", "test_saving_where_it_cannot_is_an_error"
)
def saving_fails_in_silence(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def save_pretrained(self, path: str) -> None:
            try:
                super().save_pretrained(path)
            except UserError:
                return

    return Broken


@mutant("greedy_samples", "greedy answers are drawn like others", "test_greedy_generation_takes_the_likeliest_tokens")
def greedy_samples(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def generate(self, data: Any, greedy: bool = False) -> Any:
            return super().generate(data, False)

    return Broken

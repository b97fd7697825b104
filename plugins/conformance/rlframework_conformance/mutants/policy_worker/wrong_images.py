"""Images of other rows, in another order, or with an image token too few or too many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packed_tensor import PackedTensor
from rlframework_conformance import cases
from rlframework_conformance.mutants.mutant import Mutant, mutant
from rlframework_conformance.mutants.policy_worker.engine_access import (
    STATE,
    changed_updates,
    in_engine,
    in_service,
    whole_weights,
)

PICTURES = "test_rows_see_their_own_images"
PATCHES = "test_images_of_different_sizes_keep_to_their_rows"
PARTS = "test_one_part_is_trained"
WITHOUT = "test_parameters_without_a_gradient_are_left_alone"


def _broken_rows(name: str, bug: str, change: Callable[[BatchedDataDict[Any]], BatchedDataDict[Any]]) -> Mutant:
    """A mutant that computes `change(rows)` in place of the rows with images."""

    @in_service("microbatching_class")
    def break_it(microbatching_class: Any) -> Any:
        class Broken(microbatching_class):  # type: ignore[misc]
            def split(self, data: Any, *args: Any, **options: Any) -> Any:
                if "pixel_values" in data:
                    data = change(data)
                return super().split(data, *args, **options)

        return Broken

    return mutant(name, bug, PICTURES)(break_it)


def _with_images(rows: BatchedDataDict[Any], images: list[Any]) -> BatchedDataDict[Any]:
    changed = rows.slice(0, rows.size)
    changed["pixel_values"] = PackedTensor(images, rows["pixel_values"].dim_to_pack)
    return changed


def _same_sizes(rows: BatchedDataDict[Any]) -> list[int]:
    """The rows with one image."""
    return [row for row, image in enumerate(rows["pixel_values"].tensors) if image is not None and image.shape[1] == 1]


def _swapped(rows: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    images, chosen = list(rows["pixel_values"].tensors), _same_sizes(rows)
    for row, other in zip(chosen, reversed(chosen), strict=True):
        images[row] = rows["pixel_values"].tensors[other]
    return _with_images(rows, images)


def _of_another_row(rows: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    images, chosen = list(rows["pixel_values"].tensors), _same_sizes(rows)
    for row in chosen[1:]:
        images[row] = images[chosen[0]]
    return _with_images(rows, images)


def _token_too_few(rows: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """An image token of the first row with an image is one of the second's: the model sees the right number in all."""
    changed, token = rows.slice(0, rows.size), cases.image_token()
    ids = changed["input_ids"].clone()
    row, other = _same_sizes(rows)[:2]
    ids[row, (ids[row] == token).nonzero()[-1]] = 3
    ids[other, (ids[other] == token).nonzero()[0] - 1] = token
    changed["input_ids"] = ids
    return changed


image_order_swapped = _broken_rows(
    "image_order_swapped", "The images of rows are passed to the model in another order than the rows.", _swapped
)
features_of_another_row = _broken_rows(
    "features_of_another_row", "Rows get the features of the first image of their batch.", _of_another_row
)
image_token_too_few = _broken_rows(
    "image_token_too_few", "A row has an image token too few, and another row one too many.", _token_too_few
)


@mutant("patches_numbered_one_by_one", "Tokens of images are numbered like text.", PATCHES)
@in_service("microbatching_class")
def patches_numbered_one_by_one(microbatching_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(microbatching_class):  # type: ignore[misc]
        def mode(self, data: Any = None) -> str:
            return "padded"

        def split(self, *args: Any, **options: Any) -> Any:
            found = list(super().split(*args, **options))
            for inputs in (microbatch.processed_inputs for microbatch in found):
                ids = inputs.input_ids
                inputs.vlm_kwargs["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
            return found

    return Broken


@mutant("freeze_ignored", "All parts are trained, whatever is configured.", PARTS)
@in_engine
def freeze_ignored(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        config: Any

        def build(self, *, init_optimizer: bool) -> None:
            self.config = self.config.model_copy(update={"freeze": None})
            super().build(init_optimizer=init_optimizer)

    return Broken


decays_without_a_gradient = mutant(
    "decays_without_a_gradient", "Weight decay applies to parameters without a gradient too.", WITHOUT, needs=STATE
)(changed_updates(lambda _, before, after: 0.999 * after if after.equal(before) else after))


@mutant(
    "steps_counted_without_a_gradient",
    "A step counts for all parameters, also for those without a gradient in it.",
    WITHOUT,
    needs=STATE,
)
@in_engine
def steps_counted_without_a_gradient(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
            done = super().clip_and_step(max_grad_norm, lr)
            moments = dict(self.gather_moments())
            most = max(each.steps for each in moments.values())
            self.load_moments({name: replace(each, steps=most) for name, each in moments.items()})
            return done

    return Broken


@mutant(
    "gradients_of_the_step_before",
    "A parameter without a gradient is updated with that of an earlier step.",
    WITHOUT,
    needs=STATE,
)
@in_engine
def gradients_of_the_step_before(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
            before = whole_weights(self)
            done = super().clip_and_step(max_grad_norm, lr)
            after, last = whole_weights(self), getattr(self, "last_updates", {})
            updates = {name: weight - before[name] for name, weight in after.items()}
            stale = {name: one if one.any() else last.get(name, one) for name, one in updates.items()}
            self.last_updates = stale
            self.load_weights({name: before[name] + one for name, one in stale.items()})
            return done

    return Broken

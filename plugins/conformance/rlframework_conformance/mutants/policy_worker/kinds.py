"""Violations of contract 2 for kinds of models: a step ignores what makes the kind, or noise is left on.

The layout of packed rows gets the settings of attention scores from the model, so that is where packed rows lose them.
Models of images get those of other rows, in another order, or with an image token too few or too many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.models.attention import RowLayout
from rlframework.models.rotary import SequenceRotary
from rlframework.models.varlen import PLAIN, Scores
from rlframework.policy.engine import Engine
from rlframework.policy.head.patch import LogitFormula
from rlframework.policy.microbatching import Microbatching
from rlframework_conformance import cases
from rlframework_conformance.mutants.mutant import after, around, before, mutant, together
from rlframework_conformance.mutants.policy_worker.engine_access import (
    STATE,
    around_forward,
    changed_updates,
    head_of,
    module_of,
    whole_weights,
)


class _Other(RowLayout):
    """The layout of a row in which some settings of attention scores are replaced."""

    def __init__(self, layout: RowLayout, settings: dict[str, Any]) -> None:
        self._layout, self._settings = layout, settings

    def attend(self, query: Any, key: Any, value: Any, scores: Scores = PLAIN) -> Any:
        """See `RowLayout.attend`."""
        return self._layout.attend(query, key, value, scores._replace(**self._settings))


def _lost_in_packed_rows(**settings: Any) -> Callable[[Any], Any]:
    """Replace these settings of attention scores in packed rows."""

    @around_forward
    def forward(engine: Any, keywords: dict[str, Any]) -> dict[str, Any]:
        layout = keywords.get("row_layout")
        return keywords if layout is None else {**keywords, "row_layout": _Other(layout, settings)}

    return forward


@mutant(
    "left_in_training_mode", "The model trains in training mode, in which it is random, although all dropout is off."
)
@around(Engine.build)
def _left_in_training_mode(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    model = module_of(engine)
    model.train = partial(nn.Module.train, model)


@mutant(
    "frequencies_of_the_longest_row",
    "Rotary frequencies that depend on the length are those of the longest row of a microbatch for all of its rows.",
)
@around(Engine.build)
def _frequencies_of_the_longest_row(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    for module in module_of(engine).modules():
        if isinstance(vars(module).get("forward"), SequenceRotary):
            del module.forward  # that of transformers shows again


def _around_rows(change: Callable[[BatchedDataDict[Any], list[int]], None]) -> Callable[[Any], Any]:
    """Decorate `change(rows, chosen)`, which changes a copy of rows; the `chosen` have an image of equal size."""

    @around(Microbatching.split)
    def split(call: Any, microbatching: Any, data: Any, *args: Any) -> Any:
        if "pixel_values" in data:
            data, images = data.slice(0, data.size), data["pixel_values"].tensors
            change(data, [row for row, image in enumerate(images) if image is not None and image.shape[1] == 1])
        return call(data, *args)

    return split


def _give_images(rows: BatchedDataDict[Any], sources: dict[int, int]) -> None:
    """Give each row of `sources` the images of another one."""
    images = rows["pixel_values"]
    tensors = [images.tensors[sources.get(row, row)] for row in range(len(images.tensors))]
    rows["pixel_values"] = PackedTensor(tensors, images.dim_to_pack)


@mutant("image_order_swapped", "The images of rows are passed to the model in another order than the rows.")
@_around_rows
def _image_order_swapped(rows: BatchedDataDict[Any], chosen: list[int]) -> None:
    _give_images(rows, dict(zip(chosen, reversed(chosen), strict=True)))


@mutant("image_token_too_few", "A row has an image token too few, and another row one too many.")
@_around_rows
def _image_token_too_few(rows: BatchedDataDict[Any], chosen: list[int]) -> None:
    """The model sees the right number in all."""
    ids, token, (row, other) = rows["input_ids"].clone(), cases.image_token(), chosen[:2]
    ids[row, (ids[row] == token).nonzero()[-1]] = 3
    ids[other, (ids[other] == token).nonzero()[0] - 1] = token
    rows["input_ids"] = ids


@around(Microbatching.split)
def _number_one_by_one(call: Any, microbatching: Any, *args: Any) -> Any:
    microbatches = list(call(*args))
    for inputs in (microbatch.processed_inputs for microbatch in microbatches):
        ids = inputs.input_ids
        inputs.vlm_kwargs["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    return microbatches


@mutant(
    "steps_counted_without_a_gradient",
    "A step counts for all parameters, also for those without a gradient in it.",
    needs=STATE,
)
@around(Engine.clip_and_step)
def _steps_counted_without_a_gradient(call: Any, engine: Any, *args: Any) -> Any:
    done = call(*args)
    moments = dict(engine.gather_moments())
    most = max(each.steps for each in moments.values())
    engine.load_moments({name: replace(each, steps=most) for name, each in moments.items()})
    return done


@mutant(
    "gradients_of_the_step_before",
    "A parameter without a gradient is updated with that of an earlier step.",
    needs=STATE,
)
@around(Engine.clip_and_step)
def _gradients_of_the_step_before(call: Any, engine: Any, *args: Any) -> Any:
    before = whole_weights(engine)
    done = call(*args)
    last = vars(engine).setdefault("last_updates", {})
    updates = {name: weight - before[name] for name, weight in whole_weights(engine).items()}
    last.update({name: one for name, one in updates.items() if one.any() or name not in last})
    engine.load_weights({name: before[name] + last[name] for name in updates})
    return done


MUTANTS = (
    mutant(
        "masks_lost_with_the_window",
        "A window that the model leaves to its mask is ignored by an attention without a mask.",
    )(after(Engine.build, lambda engine: setattr(module_of(engine).config, "sliding_window", 10**6))),
    mutant(
        "cap_of_logits_lost",
        "Log-probabilities are those of the head's outputs, without the soft cap that the model puts on its logits.",
    )(after(Engine.build, lambda engine: setattr(head_of(engine), "_formula", LogitFormula()))),
    mutant("freeze_ignored", "All parts are trained, whatever is configured.")(
        before(
            Engine.build, lambda engine: setattr(engine, "config", engine.config.model_copy(update={"freeze": None}))
        )
    ),
    mutant("windows_lost_in_packed_rows", "Attention in packed rows ignores the window of a layer.")(
        _lost_in_packed_rows(window=None)
    ),
    mutant("sinks_lost_in_packed_rows", "Attention in packed rows ignores the sinks.")(
        _lost_in_packed_rows(sinks=None)
    ),
    mutant("caps_lost_in_packed_rows", "Attention in packed rows ignores the soft cap of scores.")(
        _lost_in_packed_rows(softcap=None)
    ),
    mutant("vectors_not_trained", "Parameters of one dimension (norms, biases, sinks) are not trained.", needs=STATE)(
        changed_updates(lambda name, before, after: before if after.ndim == 1 else after)
    ),
    mutant("patches_numbered_one_by_one", "Tokens of images are numbered like text.")(
        together(
            _number_one_by_one,
            around(Microbatching.batching)(
                lambda call, microbatching, data=None: microbatching.processor.batching("padded")
            ),
        )
    ),
    mutant("decays_without_a_gradient", "Weight decay applies to parameters without a gradient too.", needs=STATE)(
        changed_updates(lambda _, before, after: 0.999 * after if after.equal(before) else after)
    ),
)

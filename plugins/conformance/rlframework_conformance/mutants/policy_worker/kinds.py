"""Violations of contract 2 for kinds of models: a step ignores what makes the kind, or noise is left on.

The layout of packed rows gets the settings of attention scores from the model, so that is where packed rows lose them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from rlframework.models.attention import RowLayout
from rlframework.models.rotary import SequenceRotary
from rlframework.models.varlen import PLAIN, Scores
from rlframework.policy.engine import Engine
from rlframework.policy.head.patch import LogitFormula
from rlframework_conformance.mutants.mutant import around, mutant
from rlframework_conformance.mutants.policy_worker.engine_access import (
    STATE,
    around_forward,
    changed_updates,
    head_of,
    module_of,
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


windows_lost_in_packed_rows = mutant(
    "windows_lost_in_packed_rows", "Attention in packed rows ignores the window of a layer."
)(_lost_in_packed_rows(window=None))

sinks_lost_in_packed_rows = mutant("sinks_lost_in_packed_rows", "Attention in packed rows ignores the sinks.")(
    _lost_in_packed_rows(sinks=None)
)

caps_lost_in_packed_rows = mutant(
    "caps_lost_in_packed_rows", "Attention in packed rows ignores the soft cap of scores."
)(_lost_in_packed_rows(softcap=None))


@mutant(
    "masks_lost_with_the_window",
    "A window that the model leaves to its mask is ignored by an attention without a mask.",
)
@around(Engine.build)
def _masks_lost_with_the_window(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    module_of(engine).config.sliding_window = 10**6


@mutant(
    "cap_of_logits_lost",
    "Log-probabilities are those of the head's outputs, without the soft cap that the model puts on its logits.",
)
@around(Engine.build)
def _cap_of_logits_lost(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    head_of(engine)._formula = LogitFormula()


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


vectors_not_trained = mutant(
    "vectors_not_trained", "Parameters of one dimension (norms, biases, sinks) are not trained.", needs=STATE
)(changed_updates(lambda name, before, after: before if after.ndim == 1 else after))

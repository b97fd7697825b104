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
from rlframework.models.scores import PLAIN, Scores
from rlframework.policy.head.formula import LogitFormula
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.context import broken_forward
from rlframework_conformance.mutants.policy_worker.engine_access import (
    STATE,
    changed_updates,
    head_of,
    in_engine,
    module_of,
)


class _Other(RowLayout):
    """The layout of a row in which the scores of attention are computed as `change(scores)` says."""

    def __init__(self, layout: RowLayout, change: Callable[[Scores], Scores]) -> None:
        self._layout, self._change = layout, change

    def attend(self, query: Any, key: Any, value: Any, scores: Scores = PLAIN) -> Any:
        """See `RowLayout.attend`."""
        return self._layout.attend(query, key, value, self._change(scores))


def _lost_in_packed_rows(**settings: Any) -> Any:
    """Replace these settings of attention scores in packed rows."""

    def change(worker: Any, keywords: dict[str, Any]) -> dict[str, Any]:
        if (layout := keywords.get("row_layout")) is None:
            return keywords
        return {**keywords, "row_layout": _Other(layout, lambda scores: scores._replace(**settings))}

    return broken_forward(change)


windows_lost_in_packed_rows = mutant(
    "windows_lost_in_packed_rows",
    "Attention in packed rows ignores the window of a layer.",
    "test_windows_limit_what_a_token_sees",
    "test_windows_of_the_mask_limit_what_a_token_sees",
)(_lost_in_packed_rows(window=None))

sinks_lost_in_packed_rows = mutant(
    "sinks_lost_in_packed_rows",
    "Attention in packed rows ignores the sinks.",
    "test_sinks_take_their_share_of_attention",
)(_lost_in_packed_rows(sinks=None))

caps_lost_in_packed_rows = mutant(
    "caps_lost_in_packed_rows",
    "Attention in packed rows ignores the soft cap of scores.",
    "test_soft_caps_squash_scores_and_logits",
)(_lost_in_packed_rows(softcap=None))


@mutant(
    "masks_lost_with_the_window",
    "A window that the model leaves to its mask is ignored by an attention without a mask.",
    "test_windows_of_the_mask_limit_what_a_token_sees",
)
@in_engine
def masks_lost_with_the_window(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            super().build(init_optimizer=init_optimizer)
            module_of(self).config.sliding_window = 10**6  # type: ignore[union-attr]

    return Broken


@mutant(
    "cap_of_logits_lost",
    "Log-probabilities are those of the head's outputs, without the soft cap that the model puts on its logits.",
    "test_soft_caps_squash_scores_and_logits",
)
@in_engine
def cap_of_logits_lost(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            super().build(init_optimizer=init_optimizer)
            head_of(self)._formula = LogitFormula()

    return Broken


@mutant(
    "left_in_training_mode",
    "The model trains in training mode, in which it is random, although all dropout is off.",
    "test_nothing_is_random_in_training",
)
@in_engine
def left_in_training_mode(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            super().build(init_optimizer=init_optimizer)
            model: Any = module_of(self)
            model.train = partial(nn.Module.train, model)

    return Broken


@mutant(
    "frequencies_of_the_longest_row",
    "Rotary frequencies that depend on the length are those of the longest row of a microbatch for all of its rows.",
    "test_rotary_frequencies_are_those_of_each_length",
)
@in_engine
def frequencies_of_the_longest_row(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            super().build(init_optimizer=init_optimizer)
            for module in module_of(self).modules():
                if isinstance(vars(module).get("forward"), SequenceRotary):
                    del module.forward  # that of transformers shows again

    return Broken


vectors_not_trained = mutant(
    "vectors_not_trained",
    "Parameters of one dimension (norms, biases, sinks) are not trained.",
    "test_first_step_is_that_of_the_oracle",
    "test_norms_that_heads_share_are_learnt_from_all",
    "test_sinks_take_their_share_of_attention",
    needs=STATE,
)(changed_updates(lambda name, before, after: before if after.ndim == 1 else after))

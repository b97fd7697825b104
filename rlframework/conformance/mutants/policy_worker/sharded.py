"""Bugs against contract 5 in checkpoints of pieces, and in those of other layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlframework.conformance.layouts import Layout
from rlframework.conformance.mutants.mutant import mutant
from rlframework.errors import UserError

GOES_ON = "test_training_goes_on_to_the_bit_from_pieces"
SAME = "test_both_forms_hold_the_same_numbers"
BESIDE = "test_saving_beside_training_is_saving_before_it"


def _state(change: Callable[[Any], Any]) -> Any:
    """A worker that tells what `change` makes of its pieces."""

    def break_it(worker_class: Any) -> Any:
        class Broken(worker_class):  # type: ignore[misc]
            def sharded_state(self) -> Any:
                return change(super().sharded_state())

        return Broken

    return break_it


def _without_second_moments(state: Any) -> Any:
    moments = [
        replace(piece, local=torch.zeros_like(piece.local)) if piece.name.startswith("exp_avg_sq.") else piece
        for piece in state.moments
    ]
    return replace(state, moments=moments)


def _elsewhere(state: Any) -> Any:
    """Halves in the place of each other: pieces fill the whole as before."""

    def moved(piece: Any) -> Any:
        if not piece.shape or 2 * piece.local.shape[0] != piece.shape[0]:
            return piece
        return replace(piece, offset=(0 if piece.offset[0] else piece.local.shape[0], *piece.offset[1:]))

    return replace(state, weights=[moved(piece) for piece in state.weights])


pieces_without_second_moments = mutant(
    "pieces_without_second_moments", "the pieces of the second moments are zeros", GOES_ON, SAME
)(_state(_without_second_moments))
pieces_without_steps = mutant("pieces_without_steps", "pieces come with 0 steps of the optimizer", GOES_ON, SAME)(
    _state(lambda state: replace(state, steps=dict.fromkeys(state.steps, 0)))
)
pieces_elsewhere = mutant("pieces_elsewhere", "pieces are told in each other's places", SAME, layout=Layout(data=2))(
    _state(_elsewhere)
)


@mutant("asynchronous_is_later", "an asynchronous save writes what is there when it is finished", GOES_ON, BESIDE)
def asynchronous_is_later(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        later: tuple[str, ...] = ()

        def save_checkpoint(self, *args: Any, asynchronous: bool = False, **kwargs: Any) -> None:
            if asynchronous:
                self.later = (kwargs["weights_path"], kwargs["optimizer_path"])
            else:
                super().save_checkpoint(*args, **kwargs)

        def finish_checkpoint(self) -> None:
            paths, self.later = self.later, ()
            if paths:
                super().save_checkpoint(*paths, form="sharded")
            super().finish_checkpoint()

    return Broken


@mutant(
    "moments_of_one_layout",
    "the optimizer is left behind when the number of workers is another",
    "test_checkpoints_go_on_under_other_layouts",
)
def moments_of_one_layout(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
            from safetensors.torch import load_file

            if optimizer_path is not None:
                states = load_file(Path(optimizer_path) / "random.safetensors")
                if sum(name.startswith("cpu.") for name in states) != self.context.world_size:
                    optimizer_path = None
            super().load_checkpoint(weights_path, optimizer_path)

    return Broken


@mutant("without_checksums", "no checksum is looked at", "test_damaged_pieces_are_refused")
def without_checksums(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def _check(self, *folders: str | None) -> None:
            return

    return Broken


@mutant("failed_save_is_silent", "a save that fails is left out", "test_a_save_that_cannot_be_written_is_told")
def failed_save_is_silent(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            try:
                super().save_checkpoint(*args, **kwargs)
            except UserError:
                return

    return Broken

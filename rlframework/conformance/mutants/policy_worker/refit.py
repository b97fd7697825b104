"""Bugs of refits to engines in other processes, against contract 6: what is sent is not what the trainer has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlframework.conformance.layouts import Layout
from rlframework.conformance.mutants.mutant import mutant
from rlframework.errors import RefitError

IPC = "test_ipc_brings_the_trainers_weights_to_an_engine_in_another_process"
COLLECTIVE = "test_a_process_group_brings_the_trainers_weights_to_an_engine_in_another_process"
SQUARE = "model.layers.0.self_attn.q_proj.weight"
OTHER = "model.layers.1.self_attn.q_proj.weight"


def _sent(change: Callable[[Any, str, Tensor], Tensor]) -> Callable[[Any], Any]:
    """A worker that sends what `change(worker, name, weight)` makes of each weight, and is right otherwise."""

    def break_it(worker_class: Any) -> Any:
        class Broken(worker_class):  # type: ignore[misc]
            sending = False

            def get_weights_ipc_handles(self, keys: Iterable[str]) -> Any:
                return self._sending(super().get_weights_ipc_handles, keys)

            def broadcast_weights_for_collective(self) -> None:
                self._sending(super().broadcast_weights_for_collective)

            def _sending(self, call: Any, *arguments: Any) -> Any:
                self.sending = True
                try:
                    return call(*arguments)
                finally:
                    self.sending = False

            def gather_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
                for name, weight in super().gather_weights(names):
                    yield name, change(self, name, weight) if self.sending else weight

        return Broken

    return break_it


def _of_the_start(worker: Any, name: str, weight: Tensor) -> Tensor:
    kept: dict[str, Tensor] = worker.__dict__.setdefault("sent_first", {})
    return kept.setdefault(name, weight.clone())


def _of_another(worker: Any, name: str, weight: Tensor) -> Tensor:
    """Two weights of one shape under each other's names."""
    names = {SQUARE: OTHER, OTHER: SQUARE}
    if name not in names:
        return weight
    return worker.snapshot()[names[name]].to(weight.device)  # type: ignore[no-any-return]


weights_of_the_first_refit = mutant(
    "weights_of_the_first_refit", "every refit sends the weights of the first", IPC, COLLECTIVE
)(_sent(_of_the_start))

one_weight_stale = mutant("one_weight_stale", "a norm is sent as it was at the first refit", IPC, COLLECTIVE)(
    _sent(lambda worker, name, weight: _of_the_start(worker, name, weight) if "layernorm" in name else weight)
)

names_swapped = mutant("names_swapped", "two weights of one shape are sent under each other's names", IPC, COLLECTIVE)(
    _sent(_of_another)
)

sent_transposed = mutant("sent_transposed", "a square matrix is sent transposed", IPC, COLLECTIVE)(
    _sent(lambda worker, name, weight: weight.t().contiguous() if name == SQUARE else weight)
)

rounded_on_the_way = mutant("rounded_on_the_way", "weights pass through float16 on their way", IPC, COLLECTIVE)(
    _sent(lambda worker, name, weight: weight.to(torch.float16).to(weight.dtype))
)

part_sent_as_whole = mutant(
    "part_sent_as_whole",
    "half of a matrix that is split over two ranks is sent twice",
    IPC,
    layout=Layout(tensor=2),
)(_sent(lambda worker, name, weight: torch.cat([weight.chunk(2)[0]] * 2) if name == SQUARE else weight))


@mutant("last_weight_not_sent", "the last weight of each group is left out", IPC)
def last_weight_not_sent(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_weights_ipc_handles(self, keys: Iterable[str]) -> Any:
            return super().get_weights_ipc_handles(list(keys)[:-1])

    return Broken


@mutant("one_buffer", "a group of weights is written over the one before it, which is not read yet", IPC)
def one_buffer(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_weights_ipc_handles(self, keys: Iterable[str]) -> Any:
            names = list(keys)
            handles = super().get_weights_ipc_handles(names)
            for group in handles.values():  # it is over before anybody could have read it
                group.slots[-1].of(self._outbox.written(group)).zero_()
            return handles

    return Broken


@mutant("room_not_written", "what an engine offered room for is not there when it is told that it is", IPC)
def room_not_written(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_weights_ipc_handles(self, keys: Iterable[str]) -> Any:
            handles = super().get_weights_ipc_handles(keys)
            for group in handles.values():
                if self._outbox._room is not None:
                    group.slots[-1].of(self._outbox.written(group)).zero_()
            return handles

    return Broken


@mutant(
    "announced_in_fp32",
    "weights are announced as the trainer keeps them",
    "test_what_is_announced_is_what_the_trainer_has",
)
def announced_in_fp32(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def _transfer_dtype(self) -> torch.dtype:
            return torch.float32

    return Broken


@mutant(
    "nothing_to_prepare",
    "handles are given of whatever there is",
    "test_weights_are_asked_for_after_a_refit_was_begun",
)
def nothing_to_prepare(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_weights_ipc_handles(self, keys: Iterable[str]) -> Any:
            self.prepare_weights_for_ipc()
            return super().get_weights_ipc_handles(keys)

    return Broken


@mutant(
    "lost_engines_borne",
    "weights that nobody took are taken for sent",
    "test_an_engine_that_is_late_or_gone_is_told_and_the_trainer_goes_on",
)
def lost_engines_borne(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def broadcast_weights_for_collective(self) -> None:
            try:
                super().broadcast_weights_for_collective()
            except RefitError:
                return

    return Broken

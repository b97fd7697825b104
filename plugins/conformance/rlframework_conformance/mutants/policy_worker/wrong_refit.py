"""Refits of engines in other processes, violating contract 6: the sent weights differ from the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlframework.base.errors import RefitError
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import in_service

IPC = "test_ipc_brings_the_trainers_weights_to_an_engine_in_another_process"
COLLECTIVE = "test_a_process_group_brings_the_trainers_weights_to_an_engine_in_another_process"
SQUARE = "model.layers.0.self_attn.q_proj.weight"
OTHER = "model.layers.1.self_attn.q_proj.weight"


def _broken_sending(change: Callable[[Any, str, Tensor], Tensor]) -> Callable[[Any], Any]:
    """Break sending only: each sent weight becomes `change(engine, name, weight)`."""

    @in_service("weights_class")
    def break_it(weights_class: Any) -> Any:
        class Broken(weights_class):  # type: ignore[misc]
            def gather(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
                for name, weight in super().gather(names):
                    yield name, change(self.engine, name, weight)

        return Broken

    return break_it


def _of_the_first_refit(engine: Any, name: str, weight: Tensor) -> Tensor:
    kept: dict[str, Tensor] = engine.__dict__.setdefault("sent_first", {})
    return kept.setdefault(name, weight.clone())


weights_of_the_first_refit = mutant(
    "weights_of_the_first_refit", "Every refit sends the weights of the first one.", IPC, COLLECTIVE
)(_broken_sending(_of_the_first_refit))

one_weight_stale = mutant(
    "one_weight_stale", "The norms are always sent as they were at the first refit.", IPC, COLLECTIVE
)(
    _broken_sending(
        lambda engine, name, weight: _of_the_first_refit(engine, name, weight) if "layernorm" in name else weight
    )
)


@mutant("names_swapped", "Two weights of the same shape are sent under each other's names.", IPC, COLLECTIVE)
@in_service("weights_class")
def names_swapped(weights_class: Any) -> Any:
    """See the mutant's `bug`."""
    other = {SQUARE: OTHER, OTHER: SQUARE}

    class Broken(weights_class):  # type: ignore[misc]
        def gather(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
            for name, weight in super().gather([other.get(name, name) for name in names]):
                yield other.get(name, name), weight

    return Broken


sent_transposed = mutant("sent_transposed", "A square matrix is sent transposed.", IPC, COLLECTIVE)(
    _broken_sending(lambda engine, name, weight: weight.t().contiguous() if name == SQUARE else weight)
)

rounded_on_the_way = mutant("rounded_on_the_way", "Weights are rounded to float16 in transit.", IPC, COLLECTIVE)(
    _broken_sending(lambda engine, name, weight: weight.to(torch.float16).to(weight.dtype))
)

part_sent_as_whole = mutant(
    "part_sent_as_whole",
    "One shard of a matrix sharded over two ranks is sent twice.",
    IPC,
    layout=Layout(tensor=2),
)(_broken_sending(lambda engine, name, weight: torch.cat([weight.chunk(2)[0]] * 2) if name == SQUARE else weight))


@mutant("last_weight_not_sent", "The last weight of each group is not sent.", IPC)
def last_weight_not_sent(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_weights_ipc_handles(self, keys: Iterable[str]) -> Any:
            return super().get_weights_ipc_handles(list(keys)[:-1])

    return Broken


@mutant("one_buffer", "A group of weights overwrites the previous one before it has been read.", IPC)
def one_buffer(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_weights_ipc_handles(self, keys: Iterable[str]) -> Any:
            names = list(keys)
            handles = super().get_weights_ipc_handles(names)
            for group in handles.values():  # overwritten before any receiver can read it
                group.slots[-1].of(self.sender.ipc.written()).zero_()
            return handles

    return Broken


@mutant(
    "room_not_written", "Weights are reported as written into the engine's memory, but one of them is missing.", IPC
)
def room_not_written(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_weights_ipc_handles(self, keys: Iterable[str]) -> Any:
            handles = super().get_weights_ipc_handles(keys)
            for group in handles.values():
                if self.sender.ipc.receive_buffer is not None:
                    group.slots[-1].of(self.sender.ipc.written()).zero_()
            return handles

    return Broken


@mutant(
    "announced_in_fp32",
    "Weights are announced in fp32 instead of the transfer dtype.",
    "test_what_is_announced_is_what_the_trainer_has",
)
@in_service("weights_class")
def announced_in_fp32(weights_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(weights_class):  # type: ignore[misc]
        def transfer_dtype(self) -> torch.dtype:
            return torch.float32

    return Broken


@mutant(
    "trainer_rounded",
    "A refit rounds the trainer's own weights to the transfer dtype.",
    "test_a_refit_leaves_the_trainer_as_it_was",
)
def trainer_rounded(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def prepare_info_for_collective(self) -> Any:
            info = super().prepare_info_for_collective()
            if torch.bfloat16 in {dtype for _, dtype in info.values()}:
                rounded = {name: weight.bfloat16().to(weight.dtype) for name, weight in self.engine.snapshot().items()}
                self.engine.restore(rounded)
            return info

    return Broken


@mutant(
    "nothing_to_prepare",
    "Handles are returned without a refit having been prepared.",
    "test_weights_are_asked_for_after_a_refit_was_begun",
)
def nothing_to_prepare(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_weights_ipc_handles(self, keys: Iterable[str]) -> Any:
            self.prepare_weights_for_ipc()
            return super().get_weights_ipc_handles(keys)

    return Broken


@mutant(
    "lost_engines_borne",
    "Weights that no engine received are reported as sent.",
    "test_a_late_or_lost_engine_is_reported_and_the_trainer_goes_on",
)
def lost_engines_borne(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def broadcast_weights_for_collective(self) -> None:
            try:
                super().broadcast_weights_for_collective()
            except RefitError:
                return

    return Broken

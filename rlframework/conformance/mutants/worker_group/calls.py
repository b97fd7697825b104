"""Broken worker groups: what goes to the workers, and to which of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.conformance.mutants.mutant import Mutant
from rlframework.conformance.mutants.worker_group.base import TWO, Break, values, with_methods, without


def sharing(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Break:
    """Calls with shares are made with changed keywords; what is `None` among them is left out."""

    def break_it(part: Any) -> type:
        def run(self: Any, method_name: str, *args: Any, **given: Any) -> Any:
            return part.run_all_workers_sharded_data(self, method_name, *args, **change(given))

        return with_methods(part, run_all_workers_sharded_data=run)

    return break_it


def calling(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Break:
    """Calls of all workers are made with changed keywords."""

    def break_it(part: Any) -> type:
        def run(self: Any, method_name: str, *args: Any, **given: Any) -> Any:
            return part.run_all_workers_single_data(self, method_name, *args, **change(given))

        return with_methods(part, run_all_workers_single_data=run)

    return break_it


def giving_entries(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Break:
    """Calls with an entry for each worker are made with changed keywords."""

    def break_it(part: Any) -> type:
        def run(self: Any, method_name: str, *args: Any, **given: Any) -> Any:
            return part.run_all_workers_multiple_data(self, method_name, *args, **change(given))

        return with_methods(part, run_all_workers_multiple_data=run)

    return break_it


def backwards(value: Any) -> Any:
    """A list from its end."""
    return value[::-1] if isinstance(value, list) else value


def cut_to_two(value: Any) -> Any:
    """The first two entries of a list."""
    return value[:2] if isinstance(value, list) else value


def entries_for_all(given: dict[str, Any]) -> dict[str, Any]:
    """Nobody is skipped, and for whoever should have been there is another of the same."""
    if given.get("run_rank_0_only_axes") is None:
        return given
    return {name: value * 2 for name, value in given.items() if name == "value"}


def always_the_first(part: Any) -> type:
    """Worker 0 is called."""

    def run(self: Any, method_name: str, worker_idx: int, **given: Any) -> Any:
        return part.run_single_worker_single_data(self, method_name, 0 * worker_idx, **given)

    return with_methods(part, run_single_worker_single_data=run)


def all_for_one(part: Any) -> type:
    """All are called, and the answer of the one is returned."""

    def run(self: Any, method_name: str, worker_idx: int, **given: Any) -> Any:
        future = part.run_all_workers_single_data(self, method_name, **given)
        future.return_from_workers = [worker_idx]
        return future

    return with_methods(part, run_single_worker_single_data=run)


def wrapping_around(part: Any) -> type:
    """Python's indices."""

    def run(self: Any, method_name: str, worker_idx: int, *args: Any, **given: Any) -> Any:
        return part.run_single_worker_single_data(self, method_name, worker_idx % self.sharding.size, *args, **given)

    return with_methods(part, run_single_worker_single_data=run)


def reversed_shares(given: dict[str, Any]) -> dict[str, Any]:
    """The shares backwards."""
    axes = given.get("in_sharded_axes")
    return {name: value[::-1] if axes and name in ("share", "value") else value for name, value in given.items()}


def cut_shares(given: dict[str, Any]) -> dict[str, Any]:
    """As many shares as there are workers are taken, whatever was given."""
    if isinstance(given.get("value"), list) and given["value"] and isinstance(given["value"][0], str):
        return given | {"value": given["value"][:2]}
    return given


def only_first_sharded_axis(given: dict[str, Any]) -> dict[str, Any]:
    """No axis is replicated."""
    return given | {"replicate_on_axes": []}


def plain(value: Any) -> Any:
    """A batch as a plain dictionary."""
    return dict(value) if isinstance(value, BatchedDataDict) else value


def cut_to_a_buffer(value: Any) -> Any:
    """The first million elements of a tensor."""
    if isinstance(value, list):
        return [cut_to_a_buffer(entry) for entry in value]
    return value[: 2**20] if isinstance(value, torch.Tensor) else value


def picklable(given: dict[str, Any]) -> dict[str, Any]:
    """What cannot be pickled becomes None."""
    kept = {}
    for name, value in given.items():
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001 - whatever it is, the bug is that it goes unnoticed
            value = None
        kept[name] = value
    return kept


def shared_memory(part: Any) -> type:
    """What the workers do to a tensor or a list shows in the driver."""

    def run(self: Any, method_name: str, **given: Any) -> Any:
        future = part.run_all_workers_single_data(self, method_name, **given)
        for value in given.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        return future

    return with_methods(part, run_all_workers_single_data=run)


def positional(part: Any) -> type:
    """A positional argument is taken for another one."""

    def single(self: Any, method_name: str, *args: Any, **given: Any) -> Any:
        return part.run_all_workers_single_data(self, method_name, **dict.fromkeys(["value"][: len(args)], 0), **given)

    return with_methods(part, run_all_workers_single_data=single)


def _sharded(name: str, bug: str, test: str, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Mutant:
    return Mutant(name, bug, (test,), sharing(change), TWO)


MUTANTS = (
    _sharded(
        "shares_reversed", "shares go to the workers backwards", "test_each_worker_gets_its_share", reversed_shares
    ),
    _sharded(
        "common_lost",
        "what is common to all workers is left out",
        "test_each_worker_gets_its_share",
        without("common_kwargs"),
    ),
    _sharded(
        "replicas_not_called",
        "of a replicated axis only coordinate 0 is called",
        "test_workers_on_a_replicated_axis_get_the_same_share",
        only_first_sharded_axis,
    ),
    _sharded(
        "replicated_outputs_all_kept",
        "every replica's copy of a result comes back",
        "test_a_replicated_output_comes_back_once",
        without("output_is_replicated"),
    ),
    _sharded(
        "free_axis_called",
        "all workers of a free axis are called",
        "test_a_free_axis_is_called_at_0_only",
        lambda given: given if given.get("in_sharded_axes") else given | {"replicate_on_axes": ["data_parallel"]},
    ),
    _sharded(
        "no_dummy_calls",
        "workers of a free axis get no dummy call",
        "test_dummy_calls_reach_a_free_axis_with_none",
        without("make_dummy_calls_to_free_axes"),
    ),
    Mutant(
        "rank_0_only_ignored",
        "what only rank 0 should do, all do",
        ("test_rank_0_only_axes_skip_the_others",),
        calling(without("run_rank_0_only_axes")),
        TWO,
    ),
    Mutant(
        "one_worker_becomes_the_first",
        "a call of one worker goes to worker 0, whichever was meant",
        ("test_a_call_of_one_worker_reaches_that_one_alone",),
        always_the_first,
        TWO,
    ),
    Mutant(
        "one_worker_becomes_all",
        "a call of one worker reaches all",
        ("test_a_call_of_one_worker_reaches_that_one_alone",),
        all_for_one,
        TWO,
    ),
    Mutant(
        "indices_wrap_around",
        "a worker that is not there is counted from the other end",
        ("test_a_call_that_cannot_be_shared_out_reaches_nobody",),
        wrapping_around,
        TWO,
    ),
    Mutant(
        "entries_reversed",
        "entries go to the workers backwards",
        ("test_multiple_data_gives_each_worker_its_entry",),
        giving_entries(lambda given: values(backwards)(given)),
        TWO,
    ),
    Mutant(
        "skipped_workers_take_entries",
        "of several entries all workers get theirs, although some are to be skipped",
        ("test_multiple_data_skips_who_is_not_at_rank_0",),
        giving_entries(entries_for_all),
        TWO,
    ),
    Mutant(
        "entries_not_counted",
        "entries that are too many are dropped in silence",
        ("test_a_call_that_cannot_be_shared_out_reaches_nobody",),
        giving_entries(lambda given: values(cut_to_two)(given)),
        TWO,
    ),
    Mutant(
        "batch_becomes_a_dict",
        "a batch arrives as a plain dictionary",
        ("test_a_batch_travels_whole",),
        calling(values(plain)),
    ),
    _sharded(
        "messages_cut",
        "what is larger than a buffer is cut",
        "test_large_tensors_travel_both_ways_at_once",
        values(cut_to_a_buffer),
    ),
    Mutant(
        "memory_shared",
        "workers write into the driver's tensors",
        ("test_workers_cannot_change_what_the_driver_holds",),
        shared_memory,
        TWO,
    ),
    Mutant(
        "positional_taken",
        "positional arguments are taken",
        ("test_positional_arguments_are_refused",),
        positional,
    ),
    _sharded(
        "shares_not_counted",
        "shares that are too many are dropped in silence",
        "test_a_call_that_cannot_be_shared_out_reaches_nobody",
        cut_shares,
    ),
    Mutant(
        "unsendable_dropped",
        "what cannot be sent arrives as None",
        ("test_arguments_that_cannot_be_sent_are_refused",),
        calling(picklable),
        TWO,
    ),
)

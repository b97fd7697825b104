"""Broken worker groups: wrong arguments of calls, and calls of the wrong workers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework_conformance.mutants.mutant import Mutant
from rlframework_conformance.mutants.worker_group.replacements import TWO, Break, values, with_methods, without

Change = Callable[[dict[str, Any]], Mapping[str, Any]]


def calling(run: str, change: Change) -> Break:
    """Break the method `run` of the group: it gets the keywords `change(given)`."""

    def break_it(part: Any) -> type:
        def broken(self: Any, method_name: str, *args: Any, **given: Any) -> Any:
            return getattr(part, run)(self, method_name, *args, **change(given))

        return with_methods(part, **{run: broken})

    return break_it


def sharded_call_with(change: Change) -> Break:
    """Break `run_all_workers_sharded_data`."""
    return calling("run_all_workers_sharded_data", change)


def single_call_with(change: Change) -> Break:
    """Break `run_all_workers_single_data`."""
    return calling("run_all_workers_single_data", change)


def multiple_call_with(change: Change) -> Break:
    """Break `run_all_workers_multiple_data`."""
    return calling("run_all_workers_multiple_data", change)


def reversed_list(value: Any) -> Any:
    """Reverse a list; return any other value unchanged."""
    return value[::-1] if isinstance(value, list) else value


def first_two_entries(value: Any) -> Any:
    """Return the first two entries of a list, or any other value unchanged."""
    return value[:2] if isinstance(value, list) else value


def entries_for_all(given: dict[str, Any]) -> dict[str, Any]:
    """Skip no worker; repeat the entries so that every worker has one."""
    if given.get("run_rank_0_only_axes") is None:
        return given
    return {name: value * 2 for name, value in given.items() if name == "value"}


def always_worker_0(part: Any) -> type:
    """Call worker 0 instead of the given one."""

    def run(self: Any, method_name: str, worker_idx: int, **given: Any) -> Any:
        return part.run_single_worker_single_data(self, method_name, 0 * worker_idx, **given)

    return with_methods(part, run_single_worker_single_data=run)


def all_workers_called(part: Any) -> type:
    """Call all workers and return the result of the given one."""

    def run(self: Any, method_name: str, worker_idx: int, **given: Any) -> Any:
        future = part.run_all_workers_single_data(self, method_name, **given)
        future.return_from_workers = [worker_idx]
        return future

    return with_methods(part, run_single_worker_single_data=run)


def wrapping_indices(part: Any) -> type:
    """Let worker indices out of range wrap around."""

    def run(self: Any, method_name: str, worker_idx: int, *args: Any, **given: Any) -> Any:
        return part.run_single_worker_single_data(self, method_name, worker_idx % self.sharding.size, *args, **given)

    return with_methods(part, run_single_worker_single_data=run)


def reversed_shares(given: dict[str, Any]) -> dict[str, Any]:
    """Reverse the shares."""
    axes = given.get("in_sharded_axes")
    return {name: value[::-1] if axes and name in ("share", "value") else value for name, value in given.items()}


def first_two_shares(given: dict[str, Any]) -> dict[str, Any]:
    """Keep two shares, one per worker, and drop the rest."""
    if isinstance(given.get("value"), list) and given["value"] and isinstance(given["value"][0], str):
        return given | {"value": given["value"][:2]}
    return given


def without_replication(given: dict[str, Any]) -> dict[str, Any]:
    """Replicate on no axis."""
    return given | {"replicate_on_axes": []}


def as_dictionary(value: Any) -> Any:
    """Convert a batch to a plain dictionary."""
    return dict(value) if isinstance(value, BatchedDataDict) else value


def truncated_to_a_buffer(value: Any) -> Any:
    """Truncate a tensor to its first 2**20 elements."""
    if isinstance(value, list):
        return [truncated_to_a_buffer(entry) for entry in value]
    return value[: 2**20] if isinstance(value, torch.Tensor) else value


def unpicklable_as_none(given: dict[str, Any]) -> dict[str, Any]:
    """Replace values that cannot be pickled by None."""
    kept = {}
    for name, value in given.items():
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001 - the bug: any error goes unnoticed
            value = None
        kept[name] = value
    return kept


def by_reference(value: Any) -> Any:
    """Send the value as plain pickles do: its class by the name under which it can be imported."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - pickled in the same line


def shared_memory(part: Any) -> type:
    """Let a worker's writes to a tensor show in the driver."""

    def run(self: Any, method_name: str, **given: Any) -> Any:
        future = part.run_all_workers_single_data(self, method_name, **given)
        for value in given.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        return future

    return with_methods(part, run_all_workers_single_data=run)


def positional_as_keyword(part: Any) -> type:
    """Accept a positional argument as a keyword of another name."""

    def single(self: Any, method_name: str, *args: Any, **given: Any) -> Any:
        return part.run_all_workers_single_data(self, method_name, **dict.fromkeys(["value"][: len(args)], 0), **given)

    return with_methods(part, run_all_workers_single_data=single)


def notices_lost(part: Any) -> type:
    """Claim to notify workers, and do nothing."""

    def init(self: Any, *args: Any, **given: Any) -> None:
        part.__init__(self, *args, **given)
        self.notifies = True

    return with_methods(part, __init__=init, notify=lambda self: None)


def failures_as_results(part: Any) -> type:
    """Give a callback an empty list for a call that has failed."""

    def when_done(self: Any, future: Any, callback: Any) -> bool:
        return bool(part.when_done(self, future, lambda results: callback(results or [])))

    return with_methods(part, when_done=when_done)


def _sharded(name: str, bug: str, test: str, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Mutant:
    return Mutant(name, bug, (test,), sharded_call_with(change), TWO)


MUTANTS = (
    _sharded(
        "shares_reversed",
        "Workers get their shares in reverse order.",
        "test_each_worker_gets_its_share",
        reversed_shares,
    ),
    _sharded(
        "common_lost",
        "The arguments common to all workers are dropped.",
        "test_each_worker_gets_its_share",
        without("common_kwargs"),
    ),
    _sharded(
        "replicas_not_called",
        "Only coordinate 0 of a replicated axis is called.",
        "test_workers_on_a_replicated_axis_get_the_same_share",
        without_replication,
    ),
    _sharded(
        "replicated_outputs_all_kept",
        "A replicated output comes back once per replica.",
        "test_a_replicated_output_comes_back_once",
        without("output_is_replicated"),
    ),
    _sharded(
        "free_axis_called",
        "All workers along a free axis are called.",
        "test_a_free_axis_is_called_at_0_only",
        lambda given: given if given.get("in_sharded_axes") else given | {"replicate_on_axes": ["data_parallel"]},
    ),
    _sharded(
        "no_dummy_calls",
        "Workers along a free axis get no dummy call.",
        "test_dummy_calls_reach_a_free_axis_with_none",
        without("make_dummy_calls_to_free_axes"),
    ),
    Mutant(
        "rank_0_only_ignored",
        "All ranks run what only rank 0 should run.",
        ("test_rank_0_only_axes_skip_the_others",),
        single_call_with(without("run_rank_0_only_axes")),
        TWO,
    ),
    Mutant(
        "one_worker_becomes_the_first",
        "A call of a single worker always reaches worker 0.",
        ("test_a_call_of_one_worker_reaches_that_one_alone",),
        always_worker_0,
        TWO,
    ),
    Mutant(
        "one_worker_becomes_all",
        "A call of a single worker reaches all workers.",
        ("test_a_call_of_one_worker_reaches_that_one_alone",),
        all_workers_called,
        TWO,
    ),
    Mutant(
        "indices_wrap_around",
        "A worker index out of range wraps around.",
        ("test_a_call_that_cannot_be_sharded_reaches_no_worker",),
        wrapping_indices,
        TWO,
    ),
    Mutant(
        "entries_reversed",
        "Workers get their entries in reverse order.",
        ("test_multiple_data_gives_each_worker_its_entry",),
        multiple_call_with(lambda given: values(reversed_list)(given)),
        TWO,
    ),
    Mutant(
        "skipped_workers_take_entries",
        "Every worker gets an entry, including those that should be skipped.",
        ("test_multiple_data_skips_other_ranks_than_0",),
        multiple_call_with(entries_for_all),
        TWO,
    ),
    Mutant(
        "entries_not_counted",
        "Surplus entries are silently dropped.",
        ("test_a_call_that_cannot_be_sharded_reaches_no_worker",),
        multiple_call_with(lambda given: values(first_two_entries)(given)),
        TWO,
    ),
    Mutant(
        "notices_lost",
        "A notice does not reach the workers.",
        ("test_a_notice_reaches_each_worker_once_also_during_a_call",),
        notices_lost,
        TWO,
    ),
    Mutant(
        "callbacks_lost",
        "A callback is promised and never called.",
        ("test_a_callback_gets_the_results_of_a_call_or_none",),
        lambda part: with_methods(part, when_done=lambda self, future, callback: True),
    ),
    Mutant(
        "failures_as_results",
        "The callback of a call that has failed gets no results instead of None.",
        ("test_a_callback_gets_the_results_of_a_call_or_none",),
        failures_as_results,
    ),
    Mutant(
        "batch_becomes_a_dict",
        "A batch arrives as a plain dictionary.",
        ("test_a_batch_travels_whole",),
        single_call_with(values(as_dictionary)),
    ),
    _sharded(
        "messages_cut",
        "A tensor larger than a buffer arrives truncated.",
        "test_large_tensors_travel_both_ways_at_once",
        values(truncated_to_a_buffer),
    ),
    Mutant(
        "memory_shared",
        "Workers write into the driver's tensors.",
        ("test_workers_cannot_change_what_the_driver_holds",),
        shared_memory,
        TWO,
    ),
    Mutant(
        "positional_taken",
        "Positional arguments are accepted.",
        ("test_positional_arguments_are_refused",),
        positional_as_keyword,
    ),
    _sharded(
        "shares_not_counted",
        "Surplus shares are silently dropped.",
        "test_a_call_that_cannot_be_sharded_reaches_no_worker",
        first_two_shares,
    ),
    Mutant(
        "unsendable_dropped",
        "Arguments that cannot be pickled arrive as None.",
        ("test_arguments_that_cannot_be_sent_are_refused",),
        single_call_with(unpicklable_as_none),
        TWO,
    ),
    Mutant(
        "classes_by_reference",
        "Objects of a class that only the driver's program has cannot be sent.",
        ("test_what_workers_cannot_import_is_sent_by_value",),
        single_call_with(values(by_reference)),
        TWO,
    ),
)

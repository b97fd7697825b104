"""Broken worker groups: each changes one thing of a sound one, so they work on any class that can have two workers.

None leaves a process: what it does not end, the bench of the suite ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rlframework.conformance.layouts import Layout
from rlframework.conformance.mutants import group_bugs as bugs
from rlframework.conformance.mutants.mutant import Mutant

TWO = Layout(data=2)


def _sharded(name: str, bug: str, test: str, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Mutant:
    return Mutant(name, bug, (test,), bugs.sharing(change), TWO)


MUTANTS = (
    Mutant(
        "order_of_completion",
        "results come in another order than ranks",
        ("test_results_come_in_the_order_of_ranks_whoever_is_first",),
        bugs.awaiting(lambda group, wait: wait()[::-1]),
        TWO,
    ),
    _sharded(
        "shares_reversed", "shares go to the workers backwards", "test_each_worker_gets_its_share", bugs.reversed_shares
    ),
    _sharded(
        "common_lost",
        "what is common to all workers is left out",
        "test_each_worker_gets_its_share",
        bugs.without("common_kwargs"),
    ),
    _sharded(
        "replicas_not_called",
        "of a replicated axis only coordinate 0 is called",
        "test_workers_on_a_replicated_axis_get_the_same_share",
        bugs.only_first_sharded_axis,
    ),
    _sharded(
        "replicated_outputs_all_kept",
        "every replica's copy of a result comes back",
        "test_a_replicated_output_comes_back_once",
        bugs.without("output_is_replicated"),
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
        bugs.without("make_dummy_calls_to_free_axes"),
    ),
    Mutant(
        "rank_0_only_ignored",
        "what only rank 0 should do, all do",
        ("test_rank_0_only_axes_skip_the_others",),
        bugs.calling(bugs.without("run_rank_0_only_axes")),
        TWO,
    ),
    Mutant(
        "one_worker_becomes_the_first",
        "a call of one worker goes to worker 0, whichever was meant",
        ("test_a_call_of_one_worker_reaches_that_one_alone",),
        bugs.always_the_first,
        TWO,
    ),
    Mutant(
        "one_worker_becomes_all",
        "a call of one worker reaches all",
        ("test_a_call_of_one_worker_reaches_that_one_alone",),
        bugs.all_for_one,
        TWO,
    ),
    Mutant(
        "indices_wrap_around",
        "a worker that is not there is counted from the other end",
        ("test_a_call_that_cannot_be_shared_out_reaches_nobody",),
        bugs.wrapping_around,
        TWO,
    ),
    Mutant(
        "entries_reversed",
        "entries go to the workers backwards",
        ("test_multiple_data_gives_each_worker_its_entry",),
        bugs.giving_entries(lambda given: bugs.values(bugs.backwards)(given)),
        TWO,
    ),
    Mutant(
        "skipped_workers_take_entries",
        "of several entries all workers get theirs, although some are to be skipped",
        ("test_multiple_data_skips_who_is_not_at_rank_0",),
        bugs.giving_entries(bugs.entries_for_all),
        TWO,
    ),
    Mutant(
        "entries_not_counted",
        "entries that are too many are dropped in silence",
        ("test_a_call_that_cannot_be_shared_out_reaches_nobody",),
        bugs.giving_entries(lambda given: bugs.values(bugs.cut_to_two)(given)),
        TWO,
    ),
    Mutant(
        "one_memory_for_all_workers",
        "what one worker writes into a large argument, the others see",
        ("test_workers_cannot_change_what_other_workers_got",),
        bugs.probe("OneMemoryForAll"),
        TWO,
    ),
    Mutant(
        "one_slot_for_answers",
        "a second call overwrites the answers of the first",
        ("test_futures_may_be_awaited_in_any_order",),
        bugs.one_slot,
    ),
    Mutant(
        "batch_becomes_a_dict",
        "a batch arrives as a plain dictionary",
        ("test_a_batch_travels_whole",),
        bugs.calling(bugs.values(bugs.plain)),
    ),
    _sharded(
        "messages_cut",
        "what is larger than a buffer is cut",
        "test_large_tensors_travel_both_ways_at_once",
        bugs.values(bugs.cut_to_a_buffer),
    ),
    Mutant(
        "memory_shared",
        "workers write into the driver's tensors",
        ("test_workers_cannot_change_what_the_driver_holds",),
        bugs.shared_memory,
        TWO,
    ),
    Mutant(
        "positional_taken",
        "positional arguments are taken",
        ("test_positional_arguments_are_refused",),
        bugs.positional,
    ),
    _sharded(
        "shares_not_counted",
        "shares that are too many are dropped in silence",
        "test_a_call_that_cannot_be_shared_out_reaches_nobody",
        bugs.cut_shares,
    ),
    Mutant(
        "unsendable_dropped",
        "what cannot be sent arrives as None",
        ("test_arguments_that_cannot_be_sent_are_refused",),
        bugs.calling(bugs.picklable),
        TWO,
    ),
    Mutant(
        "failure_swallowed",
        "a failed call gives None for its results",
        (
            "test_one_failing_rank_fails_the_call_at_once",
            "test_an_answer_that_cannot_be_sent_fails_the_call",
            "test_a_group_is_not_usable_after_a_failure",
        ),
        bugs.awaiting(bugs.swallowed),
        TWO,
    ),
    Mutant(
        "no_traceback",
        "a failure is told without the worker's traceback",
        ("test_a_failure_has_the_workers_own_traceback",),
        bugs.awaiting(bugs.first_line_only),
    ),
    Mutant(
        "error_class_lost",
        "an error of rlframework's comes back as a WorkerError",
        ("test_an_error_of_rlframework_comes_back_as_its_own_class",),
        bugs.awaiting(bugs.all_worker_errors),
    ),
    Mutant(
        "wrong_rank_blamed",
        "a failure is told as that of rank 0, whoever failed",
        (
            "test_one_failing_rank_fails_the_call_at_once",
            "test_a_rank_that_dies_fails_the_call_at_once",
            "test_a_rank_that_hangs_meets_the_deadline",
        ),
        bugs.awaiting(bugs.wrong_rank),
        TWO,
    ),
    Mutant(
        "death_is_silence",
        "a worker that died counts as one that has not answered yet",
        ("test_a_rank_that_dies_fails_the_call_at_once",),
        bugs.awaiting(bugs.deaths_as_silence),
        TWO,
    ),
    Mutant(
        "death_is_a_failure",
        "a worker that died is no WorkerLost, so that no run goes on after it",
        ("test_a_rank_that_dies_fails_the_call_at_once",),
        bugs.awaiting(bugs.deaths_as_failures),
        TWO,
    ),
    Mutant(
        "failure_is_a_death",
        "what a worker raises is a WorkerLost, so that a run tries again what will fail again",
        ("test_one_failing_rank_fails_the_call_at_once",),
        bugs.awaiting(bugs.failures_as_deaths),
        TWO,
    ),
    Mutant(
        "restarts_in_silence",
        "after a failure the group goes on with new workers",
        ("test_a_group_is_not_usable_after_a_failure",),
        bugs.restarting,
        TWO,
    ),
    Mutant(
        "deadlines_ignored",
        "the deadlines of the configuration are not looked at",
        ("test_a_rank_that_hangs_meets_the_deadline", "test_starting_has_a_deadline"),
        bugs.starting(lambda spec, config: (spec, bugs.deadlines(config))),
        TWO,
    ),
    Mutant(
        "always_rank_0",
        "each is told that it is rank 0",
        ("test_every_worker_knows_who_it_is",),
        bugs.probe("AlwaysRank0"),
        TWO,
    ),
    Mutant(
        "world_of_one",
        "each thinks it is alone",
        ("test_every_worker_knows_who_it_is",),
        bugs.probe("AloneInTheWorld"),
        TWO,
    ),
    Mutant(
        "wrong_device",
        "a worker is told another device",
        ("test_every_worker_knows_who_it_is",),
        bugs.probe("OnAnotherDevice"),
    ),
    Mutant(
        "addresses_differ",
        "each is told an address of its own for the process group",
        ("test_every_worker_knows_who_it_is",),
        bugs.probe("OwnAddress"),
        TWO,
    ),
    Mutant(
        "constructor_arguments_lost",
        "workers are made without the arguments that were given",
        ("test_every_worker_knows_who_it_is",),
        bugs.starting(lambda spec, config: (replace(spec, kwargs=bugs.without("word")(dict(spec.kwargs))), config)),
    ),
    Mutant(
        "no_port", "nobody reserves a port", ("test_every_worker_has_a_process_of_its_own",), bugs.probe("NoPort"), TWO
    ),
    Mutant(
        "one_process_for_all",
        "all workers live in one process",
        ("test_every_worker_has_a_process_of_its_own",),
        bugs.one_process,
        TWO,
    ),
    Mutant(
        "failed_start_tried_again",
        "a worker that cannot be made is made without what failed",
        ("test_a_constructor_that_raises_fails_the_start",),
        bugs.hopeful,
    ),
    Mutant(
        "start_errors_lose_their_class",
        "a mistake of the user at the start is told as a failure of a worker",
        ("test_a_class_that_is_not_there_fails_the_start", "test_other_plugins_there_than_here_are_refused"),
        bugs.start_is_a_worker_error,
        TWO,
    ),
    Mutant(
        "plugins_not_compared",
        "workers do not compare their plugins with the driver's",
        ("test_other_plugins_there_than_here_are_refused",),
        bugs.starting(lambda spec, config: (replace(spec, fingerprint=None), config)),
        TWO,
    ),
    Mutant(
        "left_after_a_failure",
        "of the processes some are left when a call or a start fails",
        (
            "test_one_failing_rank_fails_the_call_at_once",
            "test_a_constructor_that_raises_fails_the_start",
            "test_shutdown_says_that_a_clean_up_failed",
            "test_shutdown_does_not_wait_for_ever",
        ),
        bugs.spare_workers,
        TWO,
    ),
    Mutant(
        "left_after_shutdown",
        "shutting down cleans up and ends no process",
        ("test_shutdown_cleans_up_and_ends_every_worker",),
        bugs.left_running,
    ),
    Mutant(
        "no_clean_up",
        "shutting down does not call the clean-up",
        ("test_shutdown_cleans_up_and_ends_every_worker", "test_shutdown_says_that_a_clean_up_failed"),
        bugs.ending(lambda end, cleanup_method, timeout: end(None, timeout)),
    ),
    Mutant(
        "second_shutdown_raises",
        "shutting down twice is an error",
        ("test_shutdown_cleans_up_and_ends_every_worker",),
        bugs.twice,
    ),
    Mutant(
        "always_in_peace",
        "shutting down always says that all ended in peace",
        ("test_shutdown_says_that_a_clean_up_failed", "test_shutdown_does_not_wait_for_ever"),
        bugs.ending(bugs.always_true),
        TWO,
    ),
    Mutant(
        "shutdown_waits",
        "the timeout of shutdown is not looked at",
        ("test_shutdown_does_not_wait_for_ever",),
        bugs.ending(lambda end, cleanup_method, timeout: end(cleanup_method, 60.0)),
        TWO,
    ),
)

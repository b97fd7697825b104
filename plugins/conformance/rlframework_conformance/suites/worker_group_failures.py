"""Requirements on how worker groups fail, start and end: one failing rank fails the call, and no process is left."""

from __future__ import annotations

import traceback
from functools import partial
from queue import Empty, Queue
from typing import Any

from rlframework.base.errors import BatchError, DeadlineExceeded, PluginError, WorkerError, WorkerLost
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework_conformance.rules import holds
from rlframework_conformance.suites.worker_group_harness import PATIENCE, PROBE, WorkerGroupHarness

_NOTHING = "nothing"
_CALLBACK_WAIT = 60.0
_TOO_LONG = 15.0
"""Seconds; so far beyond the deadlines that a driver that is kept from running for a while still notices."""
_RANK_1 = r"rank (0, )?1\b"
"""Names rank 1. Where others keep the processor busy, rank 0 may be late too."""


def _received(arrived: Queue[list[Any] | None], is_expected: bool) -> Any:
    """Return what a callback has brought, waiting for it if it is expected."""
    try:
        return arrived.get(timeout=_CALLBACK_WAIT) if is_expected else arrived.get_nowait()
    except Empty:
        return _NOTHING


class Failures:
    """One failing rank fails the call, no process hangs and no process is left."""

    @holds(7)
    def test_a_failure_has_the_workers_own_traceback(self, harness: WorkerGroupHarness) -> None:
        """The error of a call must contain the worker's traceback, so that no log is needed to find the cause."""
        group = harness.start(call=PATIENCE)
        error = harness.raises(
            Exception,
            lambda: harness.ask(group, "fail", rank=0),
            "a call that fails",
            match="a bolt is loose on rank 0",
        )
        report = "".join(traceback.format_exception(error))
        harness.require("_raise_from_here" in report, "the traceback names the function that raised", got=report[-800:])

    @holds(7)
    def test_an_error_of_rlframework_comes_back_as_its_own_class(self, harness: WorkerGroupHarness) -> None:
        """An rlframework error raised in a worker must reach the driver as the same class."""
        group = harness.start(call=PATIENCE)
        message = "the batch has 3 rows, which cannot be divided by 2"
        harness.raises(BatchError, lambda: harness.ask(group, "refuse"), "a BatchError of a worker", match=message)

    @holds(7, data_parallel=2)
    def test_one_failing_rank_fails_the_call_at_once(self, harness: WorkerGroupHarness) -> None:
        """When one rank fails, the call must fail at once, without waiting for the other rank's minute of work."""
        group = harness.start()
        call = partial(harness.ask, group, "fail", rank=1, others_take=60.0)
        match = r"rank 1\b.*a bolt is loose on rank 1"
        raised = harness.fails_in_time(WorkerError, "a call in which one rank fails", call, match)
        harness.equal("a failure counts as the loss of a worker", isinstance(raised, WorkerLost), False)
        harness.require_no_process_left("a failure")

    @holds(7, data_parallel=2)
    def test_a_rank_that_dies_fails_the_call_at_once(self, harness: WorkerGroupHarness) -> None:
        """When a process dies, for example out of memory, the call must raise `WorkerLost` before the deadline.

        A run can restart after `WorkerLost`.
        """
        group = harness.start()
        call = partial(harness.ask, group, "die", rank=1, others_take=60.0)
        harness.fails_in_time(WorkerLost, "a call in which one rank dies", call, r"rank 1\b")
        harness.require_no_process_left("the death of a worker")

    @holds(7, data_parallel=2)
    def test_a_rank_that_hangs_meets_the_deadline(self, harness: WorkerGroupHarness) -> None:
        """A rank that hangs must raise `DeadlineExceeded` after `deadlines.call`; the error names the rank."""
        group = harness.start(call=1.0)
        call = partial(harness.ask, group, "sleep", seconds=[0.0, _TOO_LONG])
        what = "a call in which one rank takes longer than the deadline"
        harness.fails_in_time(DeadlineExceeded, what, call, _RANK_1)
        harness.require_no_process_left("a deadline")

    @holds(7, data_parallel=2)
    def test_an_answer_that_cannot_be_sent_fails_the_call(self, harness: WorkerGroupHarness) -> None:
        """A result that cannot be pickled must fail the call with a `WorkerError`, not leave it waiting."""
        group = harness.start(call=PATIENCE)
        harness.raises(WorkerError, lambda: harness.ask(group, "answer_with_a_lock"), "a lock as an answer")

    @holds(7)
    def test_a_callback_gets_the_results_of_a_call_or_none(self, harness: WorkerGroupHarness) -> None:
        """`when_done` must bring results, None for a call that fails, nothing if it says that it does not call back.

        What it brings, `get_all_worker_results` returns or raises too.
        """
        group, last = harness.start(call=PATIENCE), harness.layout.workers - 1

        def ask(method: str, expected: Any, **arguments: Any) -> list[Any]:
            call = group.run_single_worker_single_data(method, worker_idx=last, **arguments)
            arrived: Queue[Any] = Queue()
            calls_back = group.when_done(call, arrived.put)
            got = _received(arrived, calls_back)
            harness.equal(f"brought by the callback of {method!r}", got, expected if calls_back else _NOTHING)
            return group.get_all_worker_results(call)

        harness.equal("results", ask("give_back", ["answer"], value="answer"), ["answer"])
        harness.raises(Exception, lambda: ask("fail", None, rank=last), "a call that fails", match="a bolt is loose")

    @holds(7, data_parallel=2)
    def test_a_group_is_not_usable_after_a_failure(self, harness: WorkerGroupHarness) -> None:
        """After a failed call the group must reject further calls, because its ranks are at different points of the
        program.
        """
        group = harness.start(call=PATIENCE)
        harness.raises(Exception, lambda: harness.ask(group, "fail", rank=1), "a call in which one rank fails")
        harness.raises(WorkerError, lambda: harness.ask(group, "who"), "a call after a failure")


class Lifecycle:
    """Startup and shutdown."""

    @holds(7)
    def test_a_constructor_that_raises_fails_the_start(self, harness: WorkerGroupHarness) -> None:
        """A constructor that raises must fail the start with its own message, and all other workers must be ended."""
        last = harness.layout.workers - 1
        harness.raises(
            Exception,
            lambda: harness.start(word="wood", fail_rank=last, start=60.0),
            "a worker whose constructor raises",
            match="cannot build a worker of wood",
        )
        harness.require_no_process_left("a start that failed")

    @holds(7, data_parallel=2)
    def test_starting_has_a_deadline(self, harness: WorkerGroupHarness) -> None:
        """Startup must raise `DeadlineExceeded` after `deadlines.start`, counted from the first process to the last
        constructor.
        """
        start = partial(harness.start, start=1.0, slow_rank=1, slow_seconds=_TOO_LONG)
        what = "a constructor that takes longer than the deadline"
        harness.fails_in_time(DeadlineExceeded, what, start, _RANK_1)
        harness.require_no_process_left("a start that took too long")

    @holds(8)
    def test_a_class_that_is_not_there_fails_the_start(self, harness: WorkerGroupHarness) -> None:
        """A missing worker class must raise a `PluginError` that names it."""
        target = "rlframework_conformance.probe_worker:NoSuchWorker"
        call = lambda: harness.start(target, start=60.0)  # noqa: E731
        harness.raises(PluginError, call, "a missing class", match="NoSuchWorker")

    @holds(8, data_parallel=2)
    def test_other_plugins_there_than_here_are_refused(self, harness: WorkerGroupHarness) -> None:
        """A worker with other plugin versions than the driver must raise a `PluginError`; it would compute something
        else.
        """
        versions = {"not-there": ("not-there-dist", "1.2.3")}
        spec = WorkerSpec(PROBE, {"folder": str(harness.folder)}, fingerprint=versions)
        harness.raises(
            PluginError, lambda: harness.start(spec=spec, start=60.0), "another plugin version", match=r"1\.2\.3"
        )

    @holds(7)
    def test_shutdown_cleans_up_and_ends_every_worker(self, harness: WorkerGroupHarness) -> None:
        """`shutdown` must run the cleanup on every worker, end all processes, return True, and do nothing when
        repeated.
        """
        group = harness.start()
        harness.equal("return value of shutdown", group.shutdown("clean_up"), True)
        harness.require_no_process_left("shutdown")
        harness.must_not_raise("a second shutdown", lambda: group.shutdown("clean_up"))
        found = {path.name: path.read_text() for path in harness.folder.glob("cleanup-*")}
        harness.equal("cleanups", found, {f"cleanup-{rank}": "cleaned\n" for rank in range(harness.layout.workers)})
        harness.raises(WorkerError, lambda: harness.ask(group, "who"), "a call after shutdown")

    @holds(7)
    def test_shutdown_says_that_a_clean_up_failed(self, harness: WorkerGroupHarness) -> None:
        """If a cleanup fails, `shutdown` must return False instead of raising, so that the caller can continue shutting
        down.
        """
        group = harness.start()
        harness.equal("return value of shutdown", group.shutdown("fail_to_clean_up"), False)
        harness.require_no_process_left("shutdown")

    @holds(7, data_parallel=2)
    def test_shutdown_does_not_wait_for_ever(self, harness: WorkerGroupHarness) -> None:
        """`shutdown` must wait at most `timeout` seconds for the cleanup, then end the workers and return False."""
        group = harness.start()
        ended = harness.within(PATIENCE, "shutdown", lambda: group.shutdown("clean_up_slowly", timeout=0.5))
        harness.equal("return value of shutdown", ended, False)
        harness.require_no_process_left("shutdown")

"""What a worker group must do: start N workers, call them as one, and leave nothing behind, whatever happens.

Run with one worker and, where the record declares `DATA_PARALLEL`, with two. What needs several workers needs other
processes too, so those tests also kill and hang. A group of one in the driver's own process is asked only for what is
possible there. Not here: GPUs, several nodes.
"""

from __future__ import annotations

import os
import threading
import traceback
from typing import TYPE_CHECKING, Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.worker_group_bench import PATIENCE, PROBE, WorkerGroupBench
from rlframework.errors import BatchError, DeadlineExceeded, PluginError, WorkerError, WorkerLost
from rlframework.interfaces.worker_group import WorkerSpec

if TYPE_CHECKING:
    pass


class _Calls:
    """Who is called with what, and whose answer comes back where."""

    @holds(1)
    def test_every_worker_knows_who_it_is(self, bench: WorkerGroupBench) -> None:
        """Rank, world size, device, one address for all, and the constructor's arguments."""
        size = bench.layout.workers
        answers = bench.ask(bench.group(), "who")
        bench.equal("ranks", [answer["rank"] for answer in answers], list(range(size)))
        bench.equal("world sizes", [answer["world_size"] for answer in answers], [size] * size)
        bench.equal("devices", [answer["device"] for answer in answers], [bench.device] * size)
        bench.equal("constructor's arguments", [answer["word"] for answer in answers], ["oak"] * size)
        bench.equal("number of addresses of the process group", len({answer["address"] for answer in answers}), 1)

    @holds(1, data_parallel=2)
    def test_every_worker_has_a_process_of_its_own(self, bench: WorkerGroupBench) -> None:
        """Else they would share what a process has one of: its random state, its GPU, its process group."""
        answers = bench.ask(bench.group(), "who")
        bench.equal("number of processes", len({os.getpid(), *(answer["pid"] for answer in answers)}), len(answers) + 1)
        port = answers[0]["address"][1]
        bench.require(0 < port < 65536, "there is a port for the process group", got=port, expected="1 to 65535")

    @holds(1, data_parallel=2)
    def test_results_come_in_the_order_of_ranks_whoever_is_first(self, bench: WorkerGroupBench) -> None:
        """Rows are put together again by the order of results."""
        bench.equal("results", bench.ask(bench.group(), "sleep", seconds=[0.4, 0.0]), [0, 1])

    @holds(1)
    def test_each_worker_gets_its_share(self, bench: WorkerGroupBench) -> None:
        """The entry at its coordinate of what is sharded, and all of what is common."""
        shares = [f"share {rank}" for rank in range(bench.layout.data)]
        group = bench.group()
        future = group.run_all_workers_sharded_data(
            "echo", in_sharded_axes=["data_parallel"], common_kwargs={"common": [1, 2]}, share=shares
        )
        expected = [(rank, {"share": share, "common": [1, 2]}) for rank, share in enumerate(shares)]
        bench.equal("what the workers got", group.get_all_worker_results(future), expected)

    @holds(1, data_parallel=2)
    def test_workers_on_a_replicated_axis_get_the_same_share(self, bench: WorkerGroupBench) -> None:
        """Tensor parallel workers hold parts of one model, and see the same rows."""
        group = bench.group((1, 2))
        future = group.run_all_workers_sharded_data(
            "echo", in_sharded_axes=["data_parallel"], replicate_on_axes=["tensor_parallel"], share=["whole"]
        )
        expected = [(0, {"share": "whole"}), (1, {"share": "whole"})]
        bench.equal("what the workers got", group.get_all_worker_results(future), expected)

    @holds(1, data_parallel=2)
    def test_a_replicated_output_comes_back_once(self, bench: WorkerGroupBench) -> None:
        """From coordinate 0; all are called."""
        group = bench.group((1, 2))
        future = group.run_all_workers_sharded_data(
            "echo",
            in_sharded_axes=["data_parallel"],
            replicate_on_axes=["tensor_parallel"],
            output_is_replicated=["tensor_parallel"],
            share=["whole"],
        )
        bench.equal("what came back", group.get_all_worker_results(future), [(0, {"share": "whole"})])
        bench.equal("calls", bench.ask(group, "calls"), [["echo"], ["echo"]])

    @holds(1, data_parallel=2)
    def test_a_free_axis_is_called_at_0_only(self, bench: WorkerGroupBench) -> None:
        """An axis that is neither sharded nor replicated."""
        group = bench.group()
        future = group.run_all_workers_sharded_data("echo", value="whole")
        bench.equal("results", group.get_all_worker_results(future), [(0, {"value": "whole"})])
        bench.equal("calls", bench.ask(group, "calls"), [["echo"], []])

    @holds(1, data_parallel=2)
    def test_dummy_calls_reach_a_free_axis_with_none(self, bench: WorkerGroupBench) -> None:
        """So that all ranks meet in a collective; what they answer is not kept."""
        group = bench.group()
        future = group.run_all_workers_sharded_data("echo", make_dummy_calls_to_free_axes=True, value="whole")
        bench.equal("results", group.get_all_worker_results(future), [(0, {"value": "whole"})])
        bench.equal("calls", bench.ask(group, "calls"), [["echo"], ["echo"]])

    @holds(1, data_parallel=2)
    def test_rank_0_only_axes_skip_the_others(self, bench: WorkerGroupBench) -> None:
        """`run_rank_0_only_axes`: what one worker writes for all."""
        group = bench.group()
        future = group.run_all_workers_single_data("echo", run_rank_0_only_axes=["data_parallel"], value=1)
        bench.equal("results", group.get_all_worker_results(future), [(0, {"value": 1})])
        bench.equal("calls", bench.ask(group, "calls"), [["echo"], []])

    @holds(1)
    def test_a_call_of_one_worker_reaches_that_one_alone(self, bench: WorkerGroupBench) -> None:
        """By its index, and what comes back is its answer."""
        group, last = bench.group(), bench.layout.workers - 1
        future = group.run_single_worker_single_data("echo", worker_idx=last, value="to one")
        bench.equal("results", group.get_all_worker_results(future), [(last, {"value": "to one"})])
        expected: list[list[str]] = [[] for _ in range(last)]
        bench.equal("calls", bench.ask(group, "calls"), [*expected, ["echo"]])

    @holds(1)
    def test_multiple_data_gives_each_worker_its_entry(self, bench: WorkerGroupBench) -> None:
        """Entry i to worker i, whatever the axes, and to all what is common."""
        group, size = bench.group(), bench.layout.workers
        future = group.run_all_workers_multiple_data(
            "echo", common_kwargs={"common": "x"}, value=[f"entry {rank}" for rank in range(size)]
        )
        expected = [(rank, {"value": f"entry {rank}", "common": "x"}) for rank in range(size)]
        bench.equal("what the workers got", group.get_all_worker_results(future), expected)

    @holds(1, data_parallel=2)
    def test_multiple_data_skips_who_is_not_at_rank_0(self, bench: WorkerGroupBench) -> None:
        """`run_rank_0_only_axes`: whoever is skipped takes no entry."""
        group = bench.group()
        future = group.run_all_workers_multiple_data("echo", run_rank_0_only_axes=["data_parallel"], value=["only"])
        bench.equal("results", group.get_all_worker_results(future), [(0, {"value": "only"})])
        bench.equal("calls", bench.ask(group, "calls"), [["echo"], []])

    @holds(7)
    def test_futures_may_be_awaited_in_any_order(self, bench: WorkerGroupBench) -> None:
        """Two calls are on their way, and each future has the results of its own."""
        group = bench.group()
        first = group.run_all_workers_single_data("give_back", value="first")
        second = group.run_all_workers_single_data("give_back", value="second")
        size = bench.layout.workers
        bench.equal("results of the second", group.get_all_worker_results(second), ["second"] * size)
        bench.equal("results of the first", group.get_all_worker_results(first), ["first"] * size)


class _Values:
    """What travels, and what is refused before it does."""

    @holds(1)
    def test_a_batch_travels_whole(self, bench: WorkerGroupBench) -> None:
        """Class, keys in order, dtypes, bits, and what is no tensor: there and back."""
        sent: BatchedDataDict[Any] = BatchedDataDict(
            ids=torch.tensor([[5, 6, 0], [7, 0, 0]]),
            mask=torch.tensor([[True, True, False], [True, False, False]]),
            half=torch.tensor([0.1, float("inf")], dtype=torch.bfloat16),
            double=torch.tensor([[1 / 3], [float("nan")]], dtype=torch.float64),
            none=torch.zeros(2, 0),
            text=["a row", "übrigens"],
            notes=[{"answer": 4}, {}],
        )
        for rank, got in enumerate(bench.ask(bench.group(), "give_back", value=sent)):
            bench.equal(f"class of the batch of rank {rank}", type(got), BatchedDataDict)
            bench.equal(f"its keys (rank {rank})", list(got), list(sent))
            for key, value in sent.items():
                if isinstance(value, torch.Tensor):
                    bench.exact(f"{key} of rank {rank}", got[key], value)
                else:
                    bench.equal(f"{key} of rank {rank}", got[key], value)

    @holds(7)
    def test_large_tensors_travel_both_ways_at_once(self, bench: WorkerGroupBench) -> None:
        """16 MiB, more than buffers hold: two calls on their way, and nobody waits for ever."""
        size = bench.layout.workers
        group = bench.group()
        sent = [torch.arange(4 * 2**20, dtype=torch.int32) + rank for rank in range(size)]
        futures = [
            group.run_all_workers_sharded_data("give_back", in_sharded_axes=["data_parallel"], value=sent)
            for _ in range(2)
        ]
        for future in futures:
            for rank, got in enumerate(group.get_all_worker_results(future)):
                bench.exact(f"the tensor of rank {rank}", got, sent[rank])

    @holds(1, data_parallel=2)
    def test_workers_cannot_change_what_the_driver_holds(self, bench: WorkerGroupBench) -> None:
        """A worker in another process has copies: what it does to its arguments stays there."""
        numbers, tensor = [3, 4], torch.tensor([1.5, 2.5])
        bench.ask(bench.group(), "spoil", numbers=numbers, tensor=tensor)
        bench.equal("the driver's list", numbers, [3, 4])
        bench.exact("the driver's tensor", tensor, torch.tensor([1.5, 2.5]))

    @holds(1, data_parallel=2)
    def test_workers_cannot_change_what_other_workers_got(self, bench: WorkerGroupBench) -> None:
        """16 MiB for all, which a group may store once: what one writes into it, no other sees, nor the next call."""
        group = bench.group()
        tensor = torch.ones(4 * 2**20)
        sums = bench.ask(group, "spoil_in_turn", tensor=tensor)
        bench.equal("sums that the workers saw, each before it wrote", sums, [float(4 * 2**20)] * len(sums))
        bench.equal("sums of the next call", bench.ask(group, "spoil_in_turn", tensor=tensor), sums)

    @holds(8)
    def test_positional_arguments_are_refused(self, bench: WorkerGroupBench) -> None:
        """Which argument is shared out is said by name; the group goes on."""
        group: Any = bench.group()
        single = group.run_all_workers_single_data
        bench.refuses(TypeError, lambda: single("give_back", 1), "a positional argument")
        shared, entries = group.run_all_workers_sharded_data, group.run_all_workers_multiple_data
        bench.refuses(TypeError, lambda: shared("give_back", [1]), "a positional argument that is shared out")
        bench.refuses(TypeError, lambda: entries("give_back", [1]), "a positional argument with entries")
        one = group.run_single_worker_single_data
        bench.refuses(TypeError, lambda: one("give_back", 0, 1), "a positional argument for one worker")
        size = bench.layout.workers
        bench.equal("results afterwards", bench.ask(group, "give_back", value=2), [2] * size)

    @holds(8)
    def test_a_call_that_cannot_be_shared_out_reaches_nobody(self, bench: WorkerGroupBench) -> None:
        """Too many shares, no list at all, an axis that is not there: an error, and the group goes on."""
        group, size = bench.group(), bench.layout.data

        def share(value: Any, axis: str = "data_parallel") -> None:
            group.get_all_worker_results(
                group.run_all_workers_sharded_data("echo", in_sharded_axes=[axis], value=value)
            )

        bench.refuses(BatchError, lambda: share(["x"] * (size + 1)), "more shares than workers", says=str(size + 1))
        bench.refuses(BatchError, lambda: share(7), "a number as shares", says="value")
        bench.refuses(ValueError, lambda: share(["x"] * size, "time"), "an axis that is not there", says="time")
        entries, workers = group.run_all_workers_multiple_data, bench.layout.workers
        many = ["x"] * (workers + 1)
        bench.refuses(BatchError, lambda: entries("echo", value=many), "more entries than workers", says="value")
        bench.refuses(BatchError, lambda: entries("echo", value=7), "a number as entries", says="value")
        bench.refuses(BatchError, lambda: entries("echo"), "no entries at all")
        one = group.run_single_worker_single_data
        bench.refuses(IndexError, lambda: one("echo", workers), "a worker that is not there", says=str(workers))
        bench.refuses(IndexError, lambda: one("echo", -1), "a worker before the first", says="-1")
        bench.equal("calls", bench.ask(group, "calls"), [[]] * bench.layout.workers)

    @holds(8, data_parallel=2)
    def test_arguments_that_cannot_be_sent_are_refused(self, bench: WorkerGroupBench) -> None:
        """A lock is nothing that another process could get."""
        group = bench.group()
        bench.refuses(
            TypeError,
            lambda: bench.within(PATIENCE, "a call", lambda: bench.ask(group, "give_back", value=threading.Lock())),
            "a lock as an argument",
        )


class _Failures:
    """One failing rank fails the call, nobody hangs, nobody is left."""

    @holds(7)
    def test_a_failure_has_the_workers_own_traceback(self, bench: WorkerGroupBench) -> None:
        """Where it happened in the worker's code, to be found without looking at a log."""
        group = bench.start(call=PATIENCE)
        error = bench.refuses(
            Exception, lambda: bench.ask(group, "fail", rank=0), "a call that fails", says="a nut is loose on rank 0"
        )
        told = "".join(traceback.format_exception(error))
        bench.require("_raise_from_here" in told, "the traceback has the function that raised", got=told[-800:])

    @holds(7)
    def test_an_error_of_rlframework_comes_back_as_its_own_class(self, bench: WorkerGroupBench) -> None:
        """A mistake of the user is told as one, whichever process found it."""
        group = bench.start(call=PATIENCE)
        says = "the batch has 3 rows, which do not go into 2"
        bench.refuses(BatchError, lambda: bench.ask(group, "refuse"), "a BatchError of a worker", says=says)

    @holds(7, data_parallel=2)
    def test_one_failing_rank_fails_the_call_at_once(self, bench: WorkerGroupBench) -> None:
        """The other rank, which is busy for a minute, is not waited for."""
        group = bench.start()
        raised = bench.refuses(
            WorkerError,
            lambda: bench.within(PATIENCE, "telling", lambda: bench.ask(group, "fail", rank=1, others_take=60.0)),
            "a call in which one rank fails",
            says=r"rank 1\b.*a nut is loose on rank 1",
        )
        bench.equal("a failure is the loss of a worker", isinstance(raised, WorkerLost), False)
        bench.require_nobody_left("a failure")

    @holds(7, data_parallel=2)
    def test_a_rank_that_dies_fails_the_call_at_once(self, bench: WorkerGroupBench) -> None:
        """Killed for want of memory, say: noticed without waiting for the deadline, and told as what a run can restart
        from.
        """
        group = bench.start()
        bench.refuses(
            WorkerLost,
            lambda: bench.within(PATIENCE, "telling", lambda: bench.ask(group, "die", rank=1, others_take=60.0)),
            "a call in which one rank dies",
            says=r"rank 1\b",
        )
        bench.require_nobody_left("the death of a worker")

    @holds(7, data_parallel=2)
    def test_a_rank_that_hangs_meets_the_deadline(self, bench: WorkerGroupBench) -> None:
        """`deadlines.call`; the error says who did not answer."""
        group = bench.start(call=1.0)
        bench.refuses(
            DeadlineExceeded,
            lambda: bench.within(PATIENCE, "giving up", lambda: bench.ask(group, "sleep", seconds=[0.0, 4.0])),
            "a call in which one rank takes longer than the deadline",
            says=r"rank 1\b",
        )
        bench.require_nobody_left("a deadline")

    @holds(7, data_parallel=2)
    def test_an_answer_that_cannot_be_sent_fails_the_call(self, bench: WorkerGroupBench) -> None:
        """With an error, and not by the silence of a worker that broke off."""
        group = bench.start(call=PATIENCE)
        bench.refuses(WorkerError, lambda: bench.ask(group, "answer_with_a_lock"), "a lock as an answer")

    @holds(7, data_parallel=2)
    def test_a_group_is_not_usable_after_a_failure(self, bench: WorkerGroupBench) -> None:
        """Ranks that stand at different places of a program cannot go on together."""
        group = bench.start(call=PATIENCE)
        bench.refuses(Exception, lambda: bench.ask(group, "fail", rank=1), "a call in which one rank fails")
        bench.refuses(WorkerError, lambda: bench.ask(group, "who"), "a call after a failure")


class _Lives:
    """Starting and ending."""

    @holds(7)
    def test_a_constructor_that_raises_fails_the_start(self, bench: WorkerGroupBench) -> None:
        """With its own message; the workers that could be made are ended."""
        last = bench.layout.workers - 1
        bench.refuses(
            Exception,
            lambda: bench.start(word="wood", fail_rank=last, start=60.0),
            "a worker that cannot be made",
            says="no worker can be made of wood",
        )
        bench.require_nobody_left("a start that failed")

    @holds(7, data_parallel=2)
    def test_starting_has_a_deadline(self, bench: WorkerGroupBench) -> None:
        """`deadlines.start`, from the first process to the last constructor."""
        bench.refuses(
            DeadlineExceeded,
            lambda: bench.within(PATIENCE, "giving up", lambda: bench.start(start=1.0, slow_rank=1, slow_seconds=4.0)),
            "a worker that takes longer to be made than the deadline",
            says=r"rank (0, )?1\b",
        )
        bench.require_nobody_left("a start that took too long")

    @holds(8)
    def test_a_class_that_is_not_there_fails_the_start(self, bench: WorkerGroupBench) -> None:
        """As a `PluginError` that names it."""
        target = "rlframework.conformance.probe_worker:NoSuchWorker"
        call = lambda: bench.start(target, start=60.0)  # noqa: E731
        bench.refuses(PluginError, call, "a class that is not there", says="NoSuchWorker")

    @holds(8, data_parallel=2)
    def test_other_plugins_there_than_here_are_refused(self, bench: WorkerGroupBench) -> None:
        """A worker that would find another version of a plugin than the driver computes something else."""
        versions = {"not-there": ("not-there-dist", "1.2.3")}
        spec = WorkerSpec(PROBE, {"folder": str(bench.folder)}, fingerprint=versions)
        bench.refuses(PluginError, lambda: bench.start(spec=spec, start=60.0), "another plugin", says=r"1\.2\.3")

    @holds(7)
    def test_shutdown_cleans_up_and_ends_every_worker(self, bench: WorkerGroupBench) -> None:
        """It says that all ended in peace; doing it again does nothing. No process outlives it."""
        group = bench.start()
        bench.equal("what shutdown returns", group.shutdown("tidy_up"), True)
        bench.require_nobody_left("shutdown")
        bench.passes("a second shutdown", lambda: group.shutdown("tidy_up"))
        found = {path.name: path.read_text() for path in bench.folder.glob("tidy-*")}
        bench.equal("clean-ups", found, {f"tidy-{rank}": "tidied\n" for rank in range(bench.layout.workers)})
        bench.refuses(WorkerError, lambda: bench.ask(group, "who"), "a call after shutdown")

    @holds(7)
    def test_shutdown_says_that_a_clean_up_failed(self, bench: WorkerGroupBench) -> None:
        """False, not an exception: whoever shuts down must be able to go on with the rest."""
        group = bench.start()
        bench.equal("what shutdown returns", group.shutdown("fail_to_tidy_up"), False)
        bench.require_nobody_left("shutdown")

    @holds(7, data_parallel=2)
    def test_shutdown_does_not_wait_for_ever(self, bench: WorkerGroupBench) -> None:
        """`timeout` seconds for the clean-up, then the workers are ended and it returns False."""
        group = bench.start()
        ended = bench.within(PATIENCE, "shutdown", lambda: group.shutdown("tidy_up_slowly", timeout=0.5))
        bench.equal("what shutdown returns", ended, False)
        bench.require_nobody_left("shutdown")


class WorkerGroupSuite(_Calls, _Values, _Failures, _Lives, Suite, sealed=True):
    """The suite of `rlframework.interfaces.worker_group.WorkerGroup`."""

    kind = "worker_group"
    bench_class = WorkerGroupBench
    layouts = True

"""Requirements on worker groups: start N workers, call them as one, and always leave nothing behind.

The suite runs with one worker and, if the record declares `DATA_PARALLEL`, with two. Tests that need several workers
also need separate processes, so they may kill and block them. A group of one worker in the driver's own process only
has to do what is possible there. Not covered: GPUs and several nodes.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch

from rlframework.base.errors import BatchError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.worker_group_failures import Failures, Lifecycle
from rlframework_conformance.suites.worker_group_harness import PATIENCE, PROBE, WorkerGroupHarness

_NOTICE_WAIT = 20.0
"""Seconds within which a notice must be seen."""


class _Calls:
    """Routing of arguments and results."""

    @holds(1)
    def test_every_worker_knows_who_it_is(self, harness: WorkerGroupHarness) -> None:
        """Each worker must know its rank, world size, device, a common address and its constructor's arguments."""
        size = harness.layout.workers
        answers = harness.ask(harness.group(), "who")
        harness.equal("ranks", [answer["rank"] for answer in answers], list(range(size)))
        harness.equal("world sizes", [answer["world_size"] for answer in answers], [size] * size)
        harness.equal("devices", [answer["device"] for answer in answers], [harness.device] * size)
        harness.equal("constructor's arguments", [answer["word"] for answer in answers], ["oak"] * size)
        harness.equal("number of addresses of the process group", len({answer["address"] for answer in answers}), 1)

    @holds(1, data_parallel=2)
    def test_every_worker_has_a_process_of_its_own(self, harness: WorkerGroupHarness) -> None:
        """Each worker must run in its own process.

        Random state, GPU and process group exist once per process and must not be shared.
        """
        answers = harness.ask(harness.group(), "who")
        harness.equal(
            "number of processes", len({os.getpid(), *(answer["pid"] for answer in answers)}), len(answers) + 1
        )
        port = answers[0]["address"][1]
        harness.require(0 < port < 65536, "the process group has a valid port", got=port, expected="1 to 65535")

    @holds(1, data_parallel=2)
    def test_results_are_in_the_order_of_ranks(self, harness: WorkerGroupHarness) -> None:
        """Results must be in rank order, whichever worker finishes first; rows are reassembled by that order."""
        harness.equal("results", harness.ask(harness.group(), "sleep", seconds=[0.4, 0.0]), [0, 1])

    @holds(1)
    def test_each_worker_gets_its_share(self, harness: WorkerGroupHarness) -> None:
        """Each worker must receive its shard of sharded arguments and the whole of common arguments."""
        shares = [f"share {rank}" for rank in range(harness.layout.data)]
        group = harness.group()
        future = group.run_all_workers_sharded_data(
            "echo", in_sharded_axes=["data_parallel"], common_kwargs={"common": [1, 2]}, share=shares
        )
        expected = [(rank, {"share": share, "common": [1, 2]}) for rank, share in enumerate(shares)]
        harness.equal("arguments the workers received", group.get_all_worker_results(future), expected)

    @holds(1, data_parallel=2)
    def test_workers_on_a_replicated_axis_get_the_same_share(self, harness: WorkerGroupHarness) -> None:
        """Workers along a replicated axis must receive the same shard: tensor-parallel ranks see the same rows."""
        group = harness.group((1, 2))
        future = group.run_all_workers_sharded_data(
            "echo", in_sharded_axes=["data_parallel"], replicate_on_axes=["tensor_parallel"], share=["whole"]
        )
        expected = [(0, {"share": "whole"}), (1, {"share": "whole"})]
        harness.equal("arguments the workers received", group.get_all_worker_results(future), expected)

    @holds(1, data_parallel=2)
    def test_a_replicated_output_comes_back_once(self, harness: WorkerGroupHarness) -> None:
        """A replicated output must come back once, from coordinate 0, although all workers are called."""
        group = harness.group((1, 2))
        future = group.run_all_workers_sharded_data(
            "echo",
            in_sharded_axes=["data_parallel"],
            replicate_on_axes=["tensor_parallel"],
            output_is_replicated=["tensor_parallel"],
            share=["whole"],
        )
        harness.equal("results", group.get_all_worker_results(future), [(0, {"share": "whole"})])
        harness.equal("calls", harness.ask(group, "calls"), [["echo"], ["echo"]])

    @holds(1, data_parallel=2)
    def test_a_free_axis_is_called_at_0_only(self, harness: WorkerGroupHarness) -> None:
        """Along an axis that is neither sharded nor replicated, only coordinate 0 must be called."""
        group = harness.group()
        future = group.run_all_workers_sharded_data("echo", value="whole")
        harness.equal("results", group.get_all_worker_results(future), [(0, {"value": "whole"})])
        harness.equal("calls", harness.ask(group, "calls"), [["echo"], []])

    @holds(1, data_parallel=2)
    def test_dummy_calls_reach_a_free_axis_with_none(self, harness: WorkerGroupHarness) -> None:
        """`make_dummy_calls_to_free_axes` must call the other workers with None and discard their results.

        This lets all ranks meet in a collective.
        """
        group = harness.group()
        future = group.run_all_workers_sharded_data("echo", make_dummy_calls_to_free_axes=True, value="whole")
        harness.equal("results", group.get_all_worker_results(future), [(0, {"value": "whole"})])
        harness.equal("calls", harness.ask(group, "calls"), [["echo"], ["echo"]])

    @holds(1, data_parallel=2)
    def test_rank_0_only_axes_skip_the_others(self, harness: WorkerGroupHarness) -> None:
        """`run_rank_0_only_axes` must call only coordinate 0 of these axes."""
        group = harness.group()
        future = group.run_all_workers_single_data("echo", run_rank_0_only_axes=["data_parallel"], value=1)
        harness.equal("results", group.get_all_worker_results(future), [(0, {"value": 1})])
        harness.equal("calls", harness.ask(group, "calls"), [["echo"], []])

    @holds(1)
    def test_a_call_of_one_worker_reaches_that_one_alone(self, harness: WorkerGroupHarness) -> None:
        """`run_single_worker_single_data` must call only the worker with the given index and return its result."""
        group, last = harness.group(), harness.layout.workers - 1
        future = group.run_single_worker_single_data("echo", worker_idx=last, value="to one")
        harness.equal("results", group.get_all_worker_results(future), [(last, {"value": "to one"})])
        expected: list[list[str]] = [[] for _ in range(last)]
        harness.equal("calls", harness.ask(group, "calls"), [*expected, ["echo"]])

    @holds(1)
    def test_multiple_data_gives_each_worker_its_entry(self, harness: WorkerGroupHarness) -> None:
        """`run_all_workers_multiple_data` must give entry i to worker i on any axes, and common arguments to all."""
        group, size = harness.group(), harness.layout.workers
        future = group.run_all_workers_multiple_data(
            "echo", common_kwargs={"common": "x"}, value=[f"entry {rank}" for rank in range(size)]
        )
        expected = [(rank, {"value": f"entry {rank}", "common": "x"}) for rank in range(size)]
        harness.equal("arguments the workers received", group.get_all_worker_results(future), expected)

    @holds(1, data_parallel=2)
    def test_multiple_data_skips_other_ranks_than_0(self, harness: WorkerGroupHarness) -> None:
        """A worker skipped by `run_rank_0_only_axes` must not consume an entry."""
        group = harness.group()
        future = group.run_all_workers_multiple_data("echo", run_rank_0_only_axes=["data_parallel"], value=["only"])
        harness.equal("results", group.get_all_worker_results(future), [(0, {"value": "only"})])
        harness.equal("calls", harness.ask(group, "calls"), [["echo"], []])

    @holds(7)
    def test_futures_may_be_awaited_in_any_order(self, harness: WorkerGroupHarness) -> None:
        """With two calls in flight, each future must return the results of its own call in any order of waiting."""
        group = harness.group()
        first = group.run_all_workers_single_data("give_back", value="first")
        second = group.run_all_workers_single_data("give_back", value="second")
        size = harness.layout.workers
        harness.equal("results of the second", group.get_all_worker_results(second), ["second"] * size)
        harness.equal("results of the first", group.get_all_worker_results(first), ["first"] * size)

    @holds(7)
    def test_a_notice_reaches_each_worker_once_also_during_a_call(self, harness: WorkerGroupHarness) -> None:
        """Each worker must see a notice once, during a call or in the next one; never, if the group has no notices."""
        group = harness.start(spec=WorkerSpec(PROBE, {"folder": str(harness.folder)}, notified=True))
        size, notifies = harness.layout.workers, group.notifies
        call = group.run_all_workers_single_data("wait_for_notice", seconds=_NOTICE_WAIT if notifies else 0.0)
        time.sleep(0.3)  # so that the call has begun
        group.notify()
        seen = group.get_all_worker_results(call)
        harness.equal("notices of each worker during a call", seen, [notifies] * size)
        harness.equal(
            "notices that were seen before", harness.ask(group, "wait_for_notice", seconds=0.2), [False] * size
        )
        group.notify()
        after = harness.ask(group, "wait_for_notice", seconds=_NOTICE_WAIT if notifies else 0.0)
        harness.equal("notices before a call", after, [notifies] * size)


class _Values:
    """Transport of arguments and results, and rejection of invalid ones."""

    @holds(1)
    def test_a_batch_travels_whole(self, harness: WorkerGroupHarness) -> None:
        """A batch must survive the round trip: class, key order, dtypes, every bit, and values that are not tensors."""
        sent: BatchedDataDict[Any] = BatchedDataDict(
            ids=torch.tensor([[5, 6, 0], [7, 0, 0]]),
            mask=torch.tensor([[True, True, False], [True, False, False]]),
            half=torch.tensor([0.1, float("inf")], dtype=torch.bfloat16),
            double=torch.tensor([[1 / 3], [float("nan")]], dtype=torch.float64),
            none=torch.zeros(2, 0),
            text=["a row", "übrigens"],
            notes=[{"answer": 4}, {}],
        )
        for rank, got in enumerate(harness.ask(harness.group(), "give_back", value=sent)):
            harness.equal(f"class of the batch of rank {rank}", type(got), BatchedDataDict)
            harness.equal(f"its keys (rank {rank})", list(got), list(sent))
            for key, value in sent.items():
                if isinstance(value, torch.Tensor):
                    harness.exact(f"{key} of rank {rank}", got[key], value)
                else:
                    harness.equal(f"{key} of rank {rank}", got[key], value)

    @holds(7)
    def test_large_tensors_travel_both_ways_at_once(self, harness: WorkerGroupHarness) -> None:
        """Two calls with 16 MiB tensors in flight must not deadlock, although they exceed every buffer."""
        size = harness.layout.workers
        group = harness.group()
        sent = [torch.arange(4 * 2**20, dtype=torch.int32) + rank for rank in range(size)]
        futures = [
            group.run_all_workers_sharded_data("give_back", in_sharded_axes=["data_parallel"], value=sent)
            for _ in range(2)
        ]
        for future in futures:
            for rank, got in enumerate(group.get_all_worker_results(future)):
                harness.exact(f"the tensor of rank {rank}", got, sent[rank])

    @holds(1, data_parallel=2)
    def test_what_workers_cannot_import_is_sent_by_value(self, harness: WorkerGroupHarness) -> None:
        """Workers must get an object of a class that only the driver's program has, such as the loss of a notebook."""

        class Plus:
            def __init__(self, added: int) -> None:
                self.added = added

            def __call__(self, value: int) -> int:
                return value + self.added

        group, size = harness.group(), harness.layout.workers
        results = harness.must_not_raise(
            "sending an object of a local class", lambda: harness.ask(group, "apply", function=Plus(3), value=4)
        )
        harness.equal("results", results, [7] * size)

    @holds(1, data_parallel=2)
    def test_workers_cannot_change_what_the_driver_holds(self, harness: WorkerGroupHarness) -> None:
        """A worker in another process must get copies; modifying its arguments must not affect the driver's."""
        numbers, tensor = [3, 4], torch.tensor([1.5, 2.5])
        harness.ask(harness.group(), "spoil", numbers=numbers, tensor=tensor)
        harness.equal("the driver's list", numbers, [3, 4])
        harness.exact("the driver's tensor", tensor, torch.tensor([1.5, 2.5]))

    @holds(1, data_parallel=2)
    def test_workers_cannot_change_what_other_workers_got(self, harness: WorkerGroupHarness) -> None:
        """A worker that writes into a shared argument must not affect other workers or the next call.

        The argument has 16 MiB, which a group may store only once.
        """
        group = harness.group()
        tensor = torch.ones(4 * 2**20)
        sums = harness.ask(group, "spoil_in_turn", tensor=tensor)
        harness.equal("sums seen by the workers, each before it wrote", sums, [float(4 * 2**20)] * len(sums))
        harness.equal("sums of the next call", harness.ask(group, "spoil_in_turn", tensor=tensor), sums)

    @holds(8)
    def test_positional_arguments_are_refused(self, harness: WorkerGroupHarness) -> None:
        """Positional arguments must raise a `TypeError`, because sharding goes by name; the group stays usable."""
        group: Any = harness.group()
        single = group.run_all_workers_single_data
        harness.raises(TypeError, lambda: single("give_back", 1), "a positional argument")
        shared, entries = group.run_all_workers_sharded_data, group.run_all_workers_multiple_data
        harness.raises(TypeError, lambda: shared("give_back", [1]), "a positional sharded argument")
        harness.raises(TypeError, lambda: entries("give_back", [1]), "a positional argument with entries")
        one = group.run_single_worker_single_data
        harness.raises(TypeError, lambda: one("give_back", 0, 1), "a positional argument for one worker")
        size = harness.layout.workers
        harness.equal("results afterwards", harness.ask(group, "give_back", value=2), [2] * size)

    @holds(8)
    def test_a_call_that_cannot_be_sharded_reaches_no_worker(self, harness: WorkerGroupHarness) -> None:
        """A call that cannot be sharded must raise an error before any worker is called; the group stays usable.

        Cases: too many shards, an argument that is not a list, an unknown axis, an unknown worker.
        """
        group, size = harness.group(), harness.layout.data

        def send(value: Any, axis: str = "data_parallel") -> None:
            group.get_all_worker_results(
                group.run_all_workers_sharded_data("echo", in_sharded_axes=[axis], value=value)
            )

        harness.raises(BatchError, lambda: send(["x"] * (size + 1)), "more shards than workers", match=str(size + 1))
        harness.raises(BatchError, lambda: send(7), "a number as a sharded argument", match="value")
        harness.raises(ValueError, lambda: send(["x"] * size, "time"), "an unknown axis", match="time")
        entries, workers = group.run_all_workers_multiple_data, harness.layout.workers
        many = ["x"] * (workers + 1)
        harness.raises(BatchError, lambda: entries("echo", value=many), "more entries than workers", match="value")
        harness.raises(BatchError, lambda: entries("echo", value=7), "a number as entries", match="value")
        harness.raises(BatchError, lambda: entries("echo"), "no entries at all")
        one = group.run_single_worker_single_data
        harness.raises(IndexError, lambda: one("echo", workers), "an unknown worker index", match=str(workers))
        harness.raises(IndexError, lambda: one("echo", -1), "a negative worker index", match="-1")
        harness.equal("calls", harness.ask(group, "calls"), [[]] * harness.layout.workers)

    @holds(8, data_parallel=2)
    def test_arguments_that_cannot_be_sent_are_refused(self, harness: WorkerGroupHarness) -> None:
        """An argument that cannot be pickled, such as a lock, must raise a `TypeError`."""
        group = harness.group()
        harness.raises(
            TypeError,
            lambda: harness.within(PATIENCE, "a call", lambda: harness.ask(group, "give_back", value=threading.Lock())),
            "a lock as an argument",
        )


class WorkerGroupSuite(_Calls, _Values, Failures, Lifecycle, Suite, sealed=True):
    """The conformance suite of `rlframework.interfaces.worker_group.WorkerGroup`."""

    kind = "worker_group"
    harness_class = WorkerGroupHarness
    layouts = True

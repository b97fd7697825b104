"""How much does the driver do for each data-parallel rank or engine, from 8 to 4,096 of them?

The work of the driver's own process for one step is measured as CPU time, with fake workers and engines that answer at
once: dealing a batch to the ranks and collecting their results, choosing engines for requests, driving the engines'
exchanges, the ledger and the seeds of asynchronous training, and the timeline. Every rank and engine has the same load:
8 rows of 64 tokens, a group; at 1,024 these are 8,192 rows, for example 512 prompts x 16. The
client's part includes the routing, which is also measured alone. Sending over a network, Ray and the workers themselves
are not in it. As in a run, garbage collection leaves out what existed before the first step.

Two things are measured apart, with results that come from another thread as in a run. Exchanges in which an engine
finishes nothing: the time of one, and of as many as a step has at most. And requests that come and finish alone: each
ends two exchanges, one as the engine is notified of it, one as it is finished.

    python benchmarks/scale.py --json docs/results/scale.json
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
from interleave import machine, table, write_json

from rlframework.algorithms.performance import collecting_what_is_new
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.generation.client import GenerationClient
from rlframework.generation.engine_handle import RemoteEngine
from rlframework.generation.scheduler import Scheduler
from rlframework.interfaces.generation import GenerationRequest, GenerationResult, Incoming, Outgoing
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import MultiWorkerFuture
from rlframework.observers.timeline import Timeline, timeline_row
from rlframework.rollout import seeds
from rlframework.rollout.ledger import Ledger
from rlframework.workers import dispatch

SIZES = (8, 64, 512, 1024, 4096)
ROWS, TOKENS, GROUP = 8, 64, 8
"""Rows of a step for each rank and engine, tokens of a row, and rows of a group."""
STEP, GOAL, AT = 30.0, 0.02, 1024
"""The driver may take `GOAL` of a step of `STEP` seconds at `AT` ranks. 30 s is short: an answer of 4,000 tokens at
100 tokens/s takes 40 s."""
POLLS = 20
"""Exchanges of each engine in the measurement of one."""
AXES = ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel")
PROMPT, TEXT, LOGPROBS = torch.arange(8), torch.arange(TOKENS), torch.zeros(TOKENS)
Found = dict[str, Any]
Callback = Callable[[list[Any] | None], None]


class FakeGroup(dispatch.DispatchingWorkerGroup):
    """Workers that return their shard."""

    def _run(self, method_name: str, plan: dispatch.Dispatch) -> MultiWorkerFuture:
        results = [each["data"] for each in plan.kwargs]
        return MultiWorkerFuture(results, return_from_workers=plan.returned, called_workers=plan.called)

    def get_all_worker_results(self, future: MultiWorkerFuture) -> list[Any]:
        return dispatch.select_results(future, future.futures)

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        return True


def deal_and_collect(ranks: int) -> None:
    """Shard a batch, call all ranks with their shards, and join the results."""
    rows = ranks * ROWS
    batch: BatchedDataDict[Any] = BatchedDataDict(
        {"input_ids": torch.zeros(rows, TOKENS, dtype=torch.int64), "lengths": torch.full((rows,), TOKENS)}
    )
    group = FakeGroup(NamedSharding(torch.arange(ranks).reshape(1, ranks, 1, 1).numpy(), AXES))
    shards = batch.shard_by_batch_size(ranks, batch_size=rows)
    replicated = [axis for axis in AXES if axis != "data_parallel"]
    future = group.run_all_workers_sharded_data(
        "train",
        data=shards,
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=replicated,
        output_is_replicated=replicated,
    )
    assert BatchedDataDict.from_batches(group.get_all_worker_results(future)).size == rows


@cache
def requests(engines: int) -> list[GenerationRequest]:
    """Return a step's requests; their lengths differ."""
    return [GenerationRequest(str(row), PROMPT, 0, 32 + row % 33) for row in range(engines * ROWS)]


@cache
def result(request_id: str) -> GenerationResult:
    """Return the completion of a request. Made once, because in a run it is made by the engine."""
    return GenerationResult(request_id, TEXT, LOGPROBS, "stop", ())


def answers(outgoing: Outgoing) -> Incoming:
    """Return results of all requests."""
    return Incoming([result(each.request_id) for each in outgoing.requests])


def route(engines: int) -> None:
    """Choose engines for requests, half of which wait for others to be finished."""
    scheduler, done = Scheduler(engines, limit=ROWS // 2), 0
    for request in requests(engines):
        scheduler.add(request)
    while done < engines * ROWS:
        for lane in range(engines):
            done += len(scheduler.received(lane, answers(scheduler.outgoing(lane))))


class FakeEngine(SimpleNamespace):
    """The handle of an engine that answers at once."""

    lanes, interval, lost, name, notified = 1, 0.1, False, "fake", False

    def watch(self) -> None: ...

    def exchange(self, outgoing: Sequence[Outgoing], timeout: float) -> Future[list[Incoming]]:
        """Return what is requested."""
        future: Future[list[Incoming]] = Future()
        future.set_result([answers(each) for each in outgoing])
        return future


def drive(engines: int) -> None:
    """Await the completions of all requests from the client."""
    client = GenerationClient([FakeEngine() for _ in range(engines)], limit=ROWS // 2)
    asyncio.run(client.generate_all(requests(engines), [None] * (engines * ROWS)))


class CallingGroup(FakeGroup):
    """A worker group that calls back from one thread for all groups, as Ray does."""

    replies: SimpleQueue[tuple[Callback, list[Any]]] = SimpleQueue()

    def __init__(self) -> None:
        super().__init__(NamedSharding([0], ["worker"]))
        self._had = list[GenerationRequest]()

    def when_done(self, future: MultiWorkerFuture, callback: Callback) -> bool:
        self.replies.put((callback, future.futures))
        return True

    @classmethod
    def call_back(cls) -> None:
        """Bring results, for ever."""
        while True:
            callback, results = cls.replies.get()
            callback(results)


class PolledGroup(CallingGroup):
    """An engine that finishes nothing in its first `polls` exchanges, and then all at once."""

    def __init__(self, polls: int) -> None:
        super().__init__()
        self._polls = polls

    def _run(self, method_name: str, plan: dispatch.Dispatch) -> MultiWorkerFuture:
        self._had += plan.kwargs[0]["requests"]
        self._polls -= 1
        incoming = Incoming() if self._polls >= 0 else answers(Outgoing(tuple(self._had)))
        return MultiWorkerFuture([incoming], return_from_workers=plan.returned, called_workers=plan.called)


def poll(engines: int, polls: int) -> None:
    """Poll engines that have one request each `polls` times."""
    handles = [RemoteEngine(PolledGroup(polls), f"engine {index}") for index in range(engines)]
    client = GenerationClient(handles, limit=1)
    asyncio.run(client.generate_all(requests(engines)[:engines], [None] * engines))


class NoticedGroup(CallingGroup):
    """An engine that waits for a notice while it has one request, and finishes a request when it gets the next."""

    notifies = True

    def __init__(self) -> None:
        super().__init__()
        self._got, self._waiting = 0, list[tuple[Callback, list[Any]]]()

    def _run(self, method_name: str, plan: dispatch.Dispatch) -> MultiWorkerFuture:
        new = plan.kwargs[0]["requests"]
        self._had += new
        self._got += len(new)
        left = 0 if self._got == ROWS else 1
        finished, self._had = self._had[: len(self._had) - left], self._had[len(self._had) - left :]
        incoming = answers(Outgoing(tuple(finished)))
        return MultiWorkerFuture([incoming], return_from_workers=plan.returned, called_workers=plan.called)

    def when_done(self, future: MultiWorkerFuture, callback: Callback) -> bool:
        if future.futures[0].results:
            return super().when_done(future, callback)
        self._waiting.append((callback, future.futures))
        return True

    def notify(self) -> None:
        while self._waiting:
            self.replies.put(self._waiting.pop())


async def send_one_by_one(client: GenerationClient, engine: int) -> None:
    """Send an engine its requests, each while the one before is being generated."""
    own = requests(len(client.engines))[engine * ROWS : (engine + 1) * ROWS]
    earlier = asyncio.create_task(client.generate(own[0], lane=engine))
    for request in own[1:]:
        task = asyncio.create_task(client.generate(request, lane=engine))
        await earlier
        earlier = task
    await earlier


def one_by_one(engines: int) -> None:
    """Send each engine the requests of a step, and await each of their completions alone."""
    handles = [RemoteEngine(NoticedGroup(), f"engine {index}") for index in range(engines)]

    async def send() -> None:
        client = GenerationClient(handles, limit=ROWS)
        await asyncio.gather(*(send_one_by_one(client, index) for index in range(engines)))

    asyncio.run(send())


def keep_the_ledger(engines: int) -> None:
    """Admit and complete the groups of a step; ask after each one, as the driver does, whether all are complete."""
    groups = engines * ROWS // GROUP
    ledger: Ledger[int, int] = Ledger(groups=groups, max_staleness=1, last_step=1, clock=time.monotonic)
    tickets = [ledger.admit(lambda step: 0) for _ in range(groups)]
    for number in reversed(range(groups)):
        ledger.settled(1)
        ticket = tickets[number]
        assert ticket is not None
        ledger.complete(ticket, 0, {0})
    assert len(ledger.take(1) or ()) == groups


def draw_seeds(engines: int) -> None:
    """Draw the seeds of each group."""
    groups = engines * ROWS // GROUP
    seeds._step_seeds.cache_clear()
    for slot in range(groups):
        seeds.ticket_seeds(7, 3, slot, GROUP, groups)


def record(engines: int) -> None:
    """Record 20 exchanges of each engine, and make the line of the step."""
    timeline = Timeline()
    for exchange in range(20):
        for engine in range(engines):
            timeline.add(f"engine {engine}", "generate", exchange * 1.5, exchange * 1.5 + 1.0)
    spans = timeline.pop()
    timeline_row(1, spans, spans[0].start, spans[0].start + STEP)


PARTS: dict[str, Callable[[int], None]] = {
    "batches": deal_and_collect,
    "routing": route,
    "client": drive,
    "ledger": keep_the_ledger,
    "seeds": draw_seeds,
    "timeline": record,
}


def seconds(part: Callable[[int], None], size: int, repeats: int) -> float:
    """Return the least CPU time of this process for a part."""
    times = []
    requests(size)
    for _ in range(repeats):
        gc.collect()
        with collecting_what_is_new():
            begun = time.process_time()
            part(size)
            times.append(time.process_time() - begun)
    return min(times)


def measure(sizes: Sequence[int]) -> Found:
    """Measure each part at each size; a part that needs longer than 20 s at one size is not measured at larger ones."""
    found: Found = {}
    for name, part in PARTS.items():
        part(8)  # imports and caches
        found[name] = {}
        for size in sizes:
            found[name][str(size)] = seconds(part, size, 5 if size <= 64 else 3)
            if found[name][str(size)] > 20.0:
                break
    return found


def measure_exchanges(sizes: Sequence[int]) -> Found:
    """Measure an exchange that finishes nothing, the most of them in a step, and requests that come one by one."""
    found: Found = {}
    poll(8, 1)
    for size in sizes:
        with_polls, without = (seconds(partial(poll, polls=polls), size, 3) for polls in (POLLS, 0))
        found[str(size)] = {
            "exchange": (with_polls - without) / size / POLLS,
            "most": STEP / longest(size, notified=True),
            "most_without_notices": STEP / longest(size, notified=False),
            "one_by_one": seconds(one_by_one, size, 3),
        }
    return found


def longest(engines: int, *, notified: bool) -> float:
    """Return the seconds of an exchange without a result while requests come one by one."""
    client: Any = GenerationClient([FakeEngine(notified=notified)] * engines, limit=1)  # type: ignore[list-item]
    client.gather = True
    return float(client.longest(client.engines[0]))


def exponent(times: Found) -> float:
    """Return the exponent with which the time grows over the two largest sizes; 1 is linear."""
    (small, first), (large, last) = [(int(size), value) for size, value in times.items()][-2:]
    return math.log(last / first) / math.log(large / small)


def exchange_table(found: Found) -> list[list[str]]:
    """Return the lines of a table with shares of a step."""
    most = ["most in a step", "of a step", "without notices", "of a step"]
    lines = [["engines", "us an exchange", *most, "us a request, one by one", "of a step"]]
    for size, each in found.items():
        idle = [(each[name], each[name] * each["exchange"] * int(size)) for name in ("most", "most_without_notices")]
        shares = [cell for count, time in idle for cell in (f"{count:.0f}", f"{time / STEP:.2%}")]
        alone = [f"{each['one_by_one'] / int(size) / ROWS * 1e6:.0f}", f"{each['one_by_one'] / STEP:.2%}"]
        lines.append([size, f"{each['exchange'] * 1e6:.0f}", *shares, *alone])
    return lines


def main() -> None:
    """Measure, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    arguments = parser.parse_args()
    threading.Thread(target=CallingGroup.call_back, daemon=True).start()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found = measure(arguments.sizes)
    head = ["part", *(f"{size}: us a rank" for size in arguments.sizes), "exponent"]
    lines = [
        [name, *(f"{times[str(n)] / n * 1e6:.0f}" for n in arguments.sizes if str(n) in times)]
        for name, times in found.items()
    ]
    lines = [[*line, *["-"] * (len(head) - 1 - len(line))] for line in lines]
    print(table([head, *([*line, f"{exponent(found[line[0]]):.2f}"] for line in lines)]))
    result: Found = {"machine": machine(), "step_seconds": STEP, "cpu_seconds": found}
    if AT in arguments.sizes:
        result["share"] = sum(times.get(str(AT), math.inf) for name, times in found.items() if name != "routing") / STEP
        print(f"at {AT}: {result['share']:.2%} of a step of {STEP:g} s (at most {GOAL:.0%})")
    result["exchanges"] = measure_exchanges(arguments.sizes)
    print(table(exchange_table(result["exchanges"])))
    if arguments.json:
        write_json(arguments.json, result)


if __name__ == "__main__":
    main()

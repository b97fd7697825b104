"""The driver's CPU time for a request that comes and finishes alone, when engines are Ray actors.

    python benchmarks/scale_ray.py [--engines 4] [--requests 200] [--rounds 7] [--json FILE]

The fake engines hold one request each, and finish it when they get the next. `ours`: `GenerationClient` and a worker
group `ray` for each engine, so that each request costs a notice, the end of the exchange in progress, and the exchange
that brings its result. Floor: the same requests to bare actors, one awaited call for each. The time is that of the
driver's process with all its threads, those of Ray included. Rounds are interleaved; both sides are first checked to
return the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import median

import ray
import torch
from interleave import machine, table, write_json

from rlframework.generation.client import GenerationClient
from rlframework.generation.engine_handle import RemoteEngine
from rlframework.interfaces.generation import GenerationRequest, GenerationResult, Incoming
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerContext, WorkerSpec
from rlframework_ray.configured_group import ConfiguredRayWorkerGroup
from rlframework_ray.plugin import RayGroupConfig

PROMPT, TOKENS, SLICE = torch.arange(8), 64, 0.005


def completion(request: GenerationRequest) -> GenerationResult:
    """Return a completion of `TOKENS` tokens."""
    return GenerationResult(request.request_id, torch.arange(TOKENS), torch.zeros(TOKENS), "stop", ())


class HoldingEngine:
    """Finishes a request when it gets the next; all of them once `requests` have come."""

    def __init__(self, requests: int, context: WorkerContext) -> None:
        self._context, self._left, self._had = context, requests, list[GenerationRequest]()

    def exchange(
        self, requests: Sequence[GenerationRequest], abort_ids: Collection[str], timeout: float | None
    ) -> Incoming:
        self._had += requests
        self._left -= len(requests)
        finished = len(self._had) - (1 if self._left else 0)
        done, self._had = self._had[:finished], self._had[finished:]
        until = time.monotonic() + (timeout or 0.0)
        while not done and not self._context.notified() and time.monotonic() < until:
            time.sleep(SLICE)
        return Incoming([completion(each) for each in done])

    def again(self, requests: int) -> None:
        self._left = requests

    def shutdown(self) -> None: ...


class BareEngine:
    """Finishes each request at once."""

    def generate(self, request: GenerationRequest) -> GenerationResult:
        return completion(request)


def start(requests: int, index: int) -> RemoteEngine:
    """Start the engine `index`."""
    spec = WorkerSpec("scale_ray:HoldingEngine", {"requests": requests}, notified=True)
    config = RayGroupConfig(name="ray", num_workers=1)
    group = ConfiguredRayWorkerGroup(spec, config, sharding=NamedSharding([0], ["data_parallel"]), device="cpu")
    return RemoteEngine(group, f"engine {index}")


def requests_of(engine: int, count: int) -> list[GenerationRequest]:
    """Return the requests of an engine."""
    return [GenerationRequest(f"{engine}-{number}", PROMPT, 0, TOKENS) for number in range(count)]


async def through_client(handles: Sequence[RemoteEngine], count: int) -> list[list[GenerationResult]]:
    """Send each engine its requests, each while the one before is being generated."""
    client = GenerationClient(handles, limit=count)

    async def send(engine: int) -> list[GenerationResult]:
        results, earlier = list[GenerationResult](), None
        for request in requests_of(engine, count):
            task = asyncio.create_task(client.generate(request, lane=engine))
            results += [] if earlier is None else [await earlier]
            earlier = task
        return [*results, *([] if earlier is None else [await earlier])]

    return list(await asyncio.gather(*map(send, range(len(handles)))))


def ours(handles: Sequence[RemoteEngine], count: int) -> list[list[GenerationResult]]:
    for handle in handles:
        handle.call("again", requests=count)
    return asyncio.run(through_client(handles, count))


def bare(actors: Sequence[ray.actor.ActorHandle], count: int) -> list[list[GenerationResult]]:
    """Await a call for each request, of all actors at the same time."""

    async def send(engine: int) -> list[GenerationResult]:
        return [await actors[engine].generate.remote(request) for request in requests_of(engine, count)]

    async def all_of_them() -> list[list[GenerationResult]]:
        return list(await asyncio.gather(*map(send, range(len(actors)))))

    return asyncio.run(all_of_them())


def main() -> None:
    """Measure, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--requests", type=int, default=200, help="of each engine and round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    import scale_ray  # by name, like the group, so that nothing of this program is pickled

    handles = [start(given.requests, index) for index in range(given.engines)]
    actors = [ray.remote(scale_ray.BareEngine).options(num_cpus=0).remote() for _ in range(given.engines)]
    sides = {"ours": lambda count: ours(handles, count), "bare calls": lambda count: bare(actors, count)}
    first, second = ([[each.token_ids.tolist() for each in one] for one in side(5)] for side in sides.values())
    if first != second:
        raise SystemExit("the two sides return different tokens")
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(given.rounds):
        for name, side in sides.items():
            begun = time.process_time()
            side(given.requests)
            times[name].append((time.process_time() - begun) / given.requests / given.engines * 1e6)
    found = {name: median(values) for name, values in times.items()}
    lines = [[name, f"{found[name]:.0f}", " ".join(f"{each:.0f}" for each in values)] for name, values in times.items()]
    print(table([["", "us a request, median", "rounds"], *lines]))
    ratio = median(mine / floor for mine, floor in zip(*times.values(), strict=True))
    print(f"ratio {ratio:.2f}")
    for handle in handles:
        handle.shutdown()
    if given.json:
        write_json(given.json, {"machine": machine(), "engines": given.engines, "us_a_request": found, "ratio": ratio})


if __name__ == "__main__":
    main()

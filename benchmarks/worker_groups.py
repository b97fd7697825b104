"""Overhead of the `ray` worker groups over the Ray calls that they need.

    python benchmarks/worker_groups.py [--workers 2] [--rounds 15] [--starts 5] [--only NAME ...] [--json FILE]

A batch of int64 tokens and fp32 log-probabilities goes to workers that read every byte and answer with sums (`call`) or
with a tensor as long as the log-probabilities (`answer`). Each worker gets a shard, or all get the same batch
(`replicated`). Floors, with the same worker class as bare Ray actors in the same environment, on the same Ray:

- `tensors`: the usual calls, with a dictionary of tensors for `actor.method.remote`, and `ray.get` for all;
- `arrays`: the same bytes as numpy arrays, which a Ray worker reads without a copy, read-only.

`start` is the time until new workers have answered, including imports of torch and transformers, compared with the same
number of bare actors; Ray is already running. On a machine with few cores, imports dominate it.

First it checks that both sides compute the same results, and the contents of the object store and of the workers'
memory are shown. Rounds are interleaved and measure wall-clock time, because other processes work; a ratio is ours /
floor, median (quartiles).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from interleave import Timings, interleave, machine, table, write_json

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerContext, WorkerSpec
from rlframework.workers import machine as this_machine
from rlframework_ray import runtime
from rlframework_ray.configured_group import ConfiguredRayWorkerGroup
from rlframework_ray.plugin import RayGroupConfig

OURS, TENSORS, ARRAYS, BARE = "ours", "tensors", "arrays", "bare actors"
WIDTH = 1024
IMPORTS = ("torch", "transformers", "transformers.models.llama.modeling_llama")


class Reader:
    """The worker class of both sides; reads tensors or arrays."""

    def __init__(self, context: WorkerContext | None = None, imports: tuple[str, ...] = ()) -> None:
        import importlib

        for name in imports:
            importlib.import_module(name)

    def ready(self) -> bool:
        return True

    def call(self, value: Mapping[str, Any]) -> list[float]:
        return [float(as_tensor(value[key]).sum()) for key in ("ids", "logprobs")]

    def answer(self, value: Mapping[str, Any]) -> Any:
        result = as_tensor(value["logprobs"]) * 2
        return result if isinstance(value["logprobs"], torch.Tensor) else result.numpy()

    def memory(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Read everything; report whether the tokens are in the object store, and how much of them was copied."""
        self.call(value)
        fields: dict[str, Any] = {}
        with open("/proc/self/smaps") as maps:
            for line in maps:
                name, _, rest = line.partition(" ")
                if not name.endswith(":"):
                    start, end = (int(bound, 16) for bound in name.split("-"))
                    inside = start <= value["ids"].data_ptr() < end
                    fields |= {"in the object store": "plasma" in line} if inside else {}
                elif inside and name == "Anonymous:":
                    fields["copied KiB"] = int(rest.split()[0])
        return fields


def as_tensor(value: Any) -> torch.Tensor:
    """Convert to a tensor without torch's warning about read-only arrays, which are not written to here."""
    import warnings

    if not isinstance(value, np.ndarray):
        return torch.as_tensor(value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(value)


def make_batch(mebibytes: float, seed: int) -> BatchedDataDict[Any]:
    """A batch of two thirds tokens and one third log-probabilities."""
    random = torch.Generator().manual_seed(seed)
    rows = max(1, round(mebibytes * 2**20 / (12 * WIDTH)))
    return BatchedDataDict(
        ids=torch.randint(0, 50_000, (rows, WIDTH), generator=random),
        logprobs=torch.rand(rows, WIDTH, generator=random).neg_(),
    )


def as_arrays(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.numpy() for key, value in batch.items()}


class Sides:
    """A group and bare actors of the same class."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.group = start_group(workers, ())
        self.actors = [bare_actor(workers, ()) for _ in range(workers)]
        ray.get([actor.ready.remote() for actor in self.actors])

    def ours(self, method: str, shares: list[Any]) -> list[Any]:
        future = self.group.run_all_workers_sharded_data(method, in_sharded_axes=["data_parallel"], value=shares)
        return self.group.get_all_worker_results(future)

    def ours_replicated(self, method: str, batch: Any) -> list[Any]:
        future = self.group.run_all_workers_sharded_data(method, replicate_on_axes=["data_parallel"], value=batch)
        return self.group.get_all_worker_results(future)

    def bare(self, method: str, shares: list[Any]) -> list[Any]:
        return ray.get([getattr(actor, method).remote(share) for actor, share in zip(self.actors, shares, strict=True)])

    def bare_replicated(self, method: str, batch: Any) -> list[Any]:
        stored = ray.put(batch)
        return ray.get([getattr(actor, method).remote(stored) for actor in self.actors])


def start_group(workers: int, imports: tuple[str, ...]) -> ConfiguredRayWorkerGroup:
    sharding = NamedSharding(list(range(workers)), ["data_parallel"])
    spec = WorkerSpec("worker_groups:Reader", {"imports": imports})
    config = RayGroupConfig(name="ray", num_workers=workers)
    return ConfiguredRayWorkerGroup(spec, config, sharding=sharding, device="cpu")


def bare_actor(workers: int, imports: tuple[str, ...]) -> Any:
    import worker_groups  # by name, like the group, so that nothing of this program is pickled

    environment = {"env_vars": this_machine.worker_environment(workers)}
    return ray.remote(worker_groups.Reader).options(num_cpus=0, runtime_env=environment).remote(imports=imports)


Case = tuple[str, dict[str, Callable[[], list[Any]]]]


def cases(sides: Sides, mebibytes: float) -> Iterator[Case]:
    shares = [make_batch(mebibytes, seed) for seed in range(sides.workers)]
    plain, arrays = [dict(share) for share in shares], [as_arrays(share) for share in shares]
    for method in ("call", "answer"):
        yield (
            f"{method}: {mebibytes:g} MiB each",
            {
                OURS: lambda method=method: sides.ours(method, shares),
                TENSORS: lambda method=method: sides.bare(method, plain),
                ARRAYS: lambda method=method: sides.bare(method, arrays),
            },
        )
    yield (
        f"call, replicated: {mebibytes:g} MiB",
        {
            OURS: lambda: sides.ours_replicated("call", shares[0]),
            TENSORS: lambda: sides.bare_replicated("call", plain[0]),
            ARRAYS: lambda: sides.bare_replicated("call", arrays[0]),
        },
    )


def check_same(name: str, ways: Mapping[str, Callable[[], list[Any]]]) -> None:
    """Exit unless all ways give the same result."""
    expected = [as_tensor(result) for result in ways[TENSORS]()]
    for way, call in ways.items():
        got = [as_tensor(result) for result in call()]
        same = len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        if not same:
            sys.exit(f"{name}: {way} and {TENSORS} give different results")


def measured(ways: Mapping[str, Callable[[], list[Any]]], rounds: int, repeats: int) -> Timings:
    def timed(call: Callable[[], list[Any]]) -> Callable[[], float]:
        def run() -> float:
            for _ in range(repeats):
                call()
            return float(repeats)

        return run

    return interleave({way: timed(call) for way, call in ways.items()}, rounds, clock=time.perf_counter)


def stored_bytes() -> int:
    """Bytes put into this machine's object store so far."""
    from ray._private import internal_api

    (node,) = ray.nodes()
    told = internal_api.node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return int(told.store_stats.cumulative_created_bytes)


def held(sides: Sides, mebibytes: float) -> dict[str, Any]:
    """Bytes stored for a replicated batch, and those that a worker copies while reading it."""
    batch = make_batch(mebibytes, 0)
    size = sum(value.nbytes for value in batch.values())
    before = stored_bytes()
    looked = sides.ours_replicated("memory", batch)
    return {"bytes of the batch": size, "bytes stored": stored_bytes() - before, "workers": looked}


def starts(workers: int, rounds: int, imports: tuple[str, ...]) -> Timings:
    """Time groups and bare actors until their first answer; shutdown is not included."""
    timings = Timings({OURS: [], BARE: []}, {OURS: [], BARE: []})
    for turn in range(rounds):
        for way in (OURS, BARE) if turn % 2 else (BARE, OURS):
            begun = time.perf_counter()
            if way == OURS:
                group = start_group(workers, imports)
                group.get_all_worker_results(group.run_all_workers_single_data("ready"))
            else:
                actors = [bare_actor(workers, imports) for _ in range(workers)]
                ray.get([actor.ready.remote() for actor in actors])
            timings.seconds[way].append(time.perf_counter() - begun)
            timings.units[way].append(1.0)
            if way == OURS:
                group.shutdown()
            else:
                for actor in actors:
                    ray.kill(actor)
            time.sleep(1.0)  # wait while Ray replaces its idle processes
    return timings


def line(name: str, timings: Timings, floor: str) -> dict[str, Any]:
    ratio = timings.ratio(OURS, floor)
    print(f"{name}, against {floor}: {ratio}", file=sys.stderr)
    seconds = {side: 1 / timings.rate(side) for side in (OURS, floor)}
    return {"case": name, "floor": floor, "ratio": asdict(ratio), "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=min(8, this_machine.cpu_count()))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--starts", type=int, default=5, help="rounds of the starts")
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.01, 1, 16, 64], metavar="MIB")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only cases with this in their name")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="one worker, little data, two rounds, to test the program")
    args = parser.parse_args()
    args.repeats, args.imports = 10, IMPORTS
    if args.small:
        args.workers, args.rounds, args.starts, args.sizes = 1, 2, 1, [0.01, 24]
        args.repeats, args.imports = 1, ("torch",)
    torch.set_num_threads(1)
    # allow more workers than cores: it affects both sides equally
    this_machine.check_cores = lambda workers: None

    def wanted(name: str) -> bool:
        return not args.only or any(word in name for word in args.only)

    runtime.acquire(0)
    found: list[dict[str, Any]] = []
    memory: dict[str, Any] = {}
    if any(wanted(name) for name in ("call", "answer", "replicated", "memory")):
        sides = Sides(args.workers)
        memory = held(sides, max(args.sizes))
        print(memory)
        for mebibytes in args.sizes:
            for name, ways in cases(sides, mebibytes):
                if wanted(name):
                    check_same(name, ways)
                    timings = measured(ways, args.rounds, 1 if mebibytes >= 4 else args.repeats)
                    found += [line(name, timings, floor) for floor in (TENSORS, ARRAYS)]
        sides.group.shutdown()
    if wanted("start"):
        found.append(line(f"start of {args.workers} workers", starts(args.workers, args.starts, args.imports), BARE))
    runtime.release(0)
    rows = [["case", "floor", "ours ms", "floor ms", "ratio"]]
    for told in found:
        ratio = told["ratio"]
        times = [f"{1e3 * told['seconds'][side]:.3g}" for side in (OURS, told["floor"])]
        spread = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        rows.append([told["case"], told["floor"], *times, spread])
    print(table(rows))
    if args.json:
        settings = {"workers": args.workers, "rounds": args.rounds, "starts": args.starts}
        write_json(
            args.json, {"machine": machine() | {"ray": ray.__version__}, **settings, "memory": memory, "cases": found}
        )


if __name__ == "__main__":
    main()

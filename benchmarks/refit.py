"""Speed of sending weights from the trainer to a generation engine in another process, including checksums.

    python benchmarks/refit.py [--mebibytes 400] [--rounds 15] [--clock wall] [--json FILE]

A trainer (dtensor, one worker process, a Llama in fp32) and one generation worker (the transformers engine, in its own
process), as in a run; each round is a whole refit, from the driver's call until the version is committed. The weights
are copied into the engine's own memory. `refit` is proven by checksums, of what arrived and of what is held; `proven
refit` also by probes, and `probes` is the time of these alone: a token sampled by the engine after each of four
prompts, without cached prefixes as after a refit, and the trainer's forward of the same rows. Floors, with the same
number of bytes:

- `bare copy`: two processes with mapped shared memory. One copies all bytes of a tensor in and signals, the other
  copies them out into its own tensor, each with one `copy_`. No names, no checksums.
- `bare copy, memcpy`: the same with numpy's copy, which is the C library's: for this many bytes it bypasses the caches,
  which is impossible while computing a checksum.
- `bare copy, overlapped` and `bare memcpy, overlapped`: the same in chunks of 32 MiB with two alternating
  buffers, so that one process copies in while the other copies out, on two cores.
- `bare write`: one process copies all bytes into the shared memory with one `copy_`, and signals: a refit that leaves
  the weights in the engine's memory, without names, proof or calls.
- `bare write, checksums`: the same in pieces of 128 MiB with checksums as in a refit: the writer's of its source, while
  in the cache, and the reader's of each piece that has arrived. What it takes longer than `bare write` is their cost.
- `bare broadcast`: one `torch.distributed.broadcast` of all bytes between two processes over gloo.
- `one forward`: a plain transformers model in the driver's process computes one row with as many tokens as the prompts
  of the probes, and the logits of as many of them as there are probes.

First it checks that all sides give the same bytes. Rounds are interleaved. `--clock wall` measures wall-clock time,
which needs idle cores: several processes take part. `--clock cpu` adds up the CPU time of all processes, which depends
less on other programs, and is not what a run waits for. A ratio is our time / floor, median (quartiles); the share is
its inverse, our speed relative to the floor's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from multiprocessing import shared_memory
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from interleave import Timings, interleave, machine, table, write_json

from rlframework import create_manager, load_config
from rlframework.conformance.policies import InspectedEngines
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.generation import GenerationEngine, SamplingParams
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.policy.client import Policy
from rlframework.weight_sync import buffers, ipc
from rlframework.weight_sync.calls import RefitCalls
from rlframework.weight_sync.coordinator import Refitter
from rlframework.weight_sync.proof import Probes

IPC, COLLECTIVE = "refit, ipc", "refit, collective"
PROVEN, PROBES = "proven refit, ipc", "probes"
BARE, MEMCPY = "bare copy", "bare copy, memcpy"
OVERLAPPED, MEMCPY_OVERLAPPED = "bare copy, overlapped", "bare memcpy, overlapped"
COPIES = BARE, MEMCPY, OVERLAPPED, MEMCPY_OVERLAPPED
WRITE, CHECKED = "bare write", "bare write, checksums"
BROADCAST, FORWARD = "bare broadcast", "one forward"
PIECE, GROUP = 32 << 20, ipc.OFFERED_GROUP
COUNT = 4  # probes
HELD = "rlframework.conformance.suites.policy_worker.inspection:held_weights"
PAIRS = (
    *((IPC, order) for order in (*COPIES, WRITE, CHECKED)),
    (CHECKED, WRITE),
    (COLLECTIVE, BROADCAST),
    (PROVEN, IPC),
    (PROBES, IPC),
    (PROBES, FORWARD),
)


# -- floors: two processes each, controlled over pipes ---------------------------------------------------------


def copying(rank: int, name: str, size: int, driver: Any, other: Any) -> None:
    """Rank 0 copies its bytes into the shared memory, rank 1 copies them out."""
    torch.set_num_threads(1)
    shared = shared_memory.SharedMemory(name)
    memory: Any = np.frombuffer(shared.buf, dtype=np.uint8)
    place: Any = None
    own = bytes_of_rank(rank, size)
    driver.send("ready")
    while (order := driver.recv()) != "end":
        if order == "sum":
            driver.send(digest(own))
            continue
        if order in (WRITE, CHECKED):
            write(rank, own, memory, order, other)
            driver.send("done")
            continue
        whole = order in (BARE, MEMCPY)
        pieces = [(0, size)] if whole else [(at, min(at + PIECE, size)) for at in range(0, size, PIECE)]
        for number, (start, end) in enumerate(pieces):
            place = memory[:end] if whole else memory[number % 2 * PIECE :][: end - start]
            if rank == 0:
                if number > 1:
                    other.recv_bytes()  # the previous contents have been read
                copy(place, own[start:end], order)
                other.send_bytes(b"in")
            else:
                other.recv_bytes()
                copy(own[start:end], place, order)
                if number + 2 < len(pieces):
                    other.send_bytes(b"out")
        driver.send("done")
    place = memory = None  # otherwise the shared memory cannot be closed


def write(rank: int, own: Any, memory: Any, order: str, other: Any) -> None:
    """Rank 0 writes its bytes into the shared memory; with checksums, rank 1 verifies them there."""
    size = len(own)
    for start in range(0, size, size if order == WRITE else GROUP):
        piece = slice(start, min(start + GROUP, size) if order == CHECKED else size)
        if rank:
            sent = other.recv()
            assert order == WRITE or buffers.checksum(torch.from_numpy(memory[piece])) == sent
        elif order == WRITE:
            copy(memory[piece], own[piece], order)
            other.send(None)
        else:
            target, source = torch.from_numpy(memory[piece]), torch.from_numpy(own[piece])
            other.send(buffers.copy_bytes(target, source, of_source=True))


def copy(target: Any, source: Any, order: str) -> None:
    """Copy with torch's `copy_`, or with numpy."""
    if order in (MEMCPY, MEMCPY_OVERLAPPED):
        target[:] = source
    else:
        torch.from_numpy(target).copy_(torch.from_numpy(source))


def broadcasting(rank: int, address: str, size: int, driver: Any, other: Any) -> None:
    """Both ranks of a gloo group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    own = bytes_of_rank(rank, size)
    tensor = torch.from_numpy(own)
    driver.send("ready")
    while (order := driver.recv()) != "end":
        if order == "sum":
            driver.send(digest(own))
            continue
        dist.broadcast(tensor, 0)
        driver.send("done")
    dist.destroy_process_group()


def bytes_of_rank(rank: int, size: int) -> Any:
    """The source of rank 0, in a tensor's memory like weights; ones for rank 1."""
    if rank:
        return torch.zeros(size, dtype=torch.uint8).fill_(1).numpy()  # touch its pages
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()


def digest(values: Any) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(values)


class Floor:
    """Two processes that run `target`, with the driver's ends of their pipes."""

    def __init__(self, target: Any, argument: str, size: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._links = []
        left, right = spawn.Pipe()
        for rank, other in enumerate((left, right)):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=target, args=(rank, argument, size, theirs, other), daemon=True)
            process.start()
            self._links.append((mine, process))
        self._answers()

    def run(self, order: str) -> None:
        """Send an order and wait for both processes."""
        self.ask(order)

    def ask(self, order: str) -> list[Any]:
        for link, _ in self._links:
            link.send(order)
        return self._answers()

    def _answers(self) -> list[Any]:
        return [link.recv() for link, _ in self._links]

    def end(self) -> None:
        for link, process in self._links:
            link.send("end")
            process.join(20)


# -- ours -------------------------------------------------------------------------------------------------------------


def make_model(path: Path, mebibytes: int) -> Any:
    """A Llama of about this size in fp32, with layers of 48 MiB, or smaller ones for a small size."""
    tokenizer = character_tokenizer([chr(0x4E00 + index) for index in range(510)])
    hidden = 1024 if mebibytes >= 100 else 128
    each = (4 * hidden * hidden + 3 * hidden * 4 * hidden) * 4 / 2**20
    layers = max(1, round(mebibytes / each))
    make_llama(path, tokenizer, hidden=hidden, layers=layers, heads=8, init_std=0.02, max_positions=64)
    return tokenizer


@contextmanager
def refitting(path: Path, tokenizer: Any, transport: str) -> Iterator[tuple[Policy, InspectedEngines]]:
    """A trainer and an engine, each in its own process."""
    manager = create_manager()
    config = load_config(
        {
            "output_dir": str(path.parent / "run"),
            "device": "cpu",
            "algorithm": {"name": "sft"},
            "environment": {"name": "addition"},
            "policy": {"model_name": str(path)},
            "worker_group": {"name": "processes", "num_workers": 1},
            "generation": {"workers": {}, "refit": {"transport": transport, "probes": 0}},
        },
        manager=manager,
    )
    with Policy(config, tokenizer, manager, init_optimizer=False) as policy:
        engines = InspectedEngines(config, policy, tokenizer, manager)
        try:
            yield policy, engines
        finally:
            engines.shutdown()


def check_weights(policy: Policy, engines: InspectedEngines, folder: Path) -> None:
    """Check that the engine's weights after a refit equal the saved ones bit for bit."""
    from rlframework.conformance.policies import weights_of

    held = engines.inspect(HELD)[0]
    for name, weight in weights_of(policy, folder).items():
        assert torch.equal(held[name].view(torch.uint8), weight.view(torch.uint8)), name


def measure(mebibytes: int, rounds: int, folder: Path, clock: Callable[[], float]) -> tuple[dict[str, Timings], int]:
    """Measure all contenders; return the timings and the bytes of a refit."""
    tokenizer = make_model(folder / "model", mebibytes)
    results: dict[str, Timings] = {}
    with ExitStack() as stack:
        policy, engines = stack.enter_context(refitting(folder / "model", tokenizer, "ipc"))
        size = engines.refitter.refit().size
        shared = shared_memory.SharedMemory(create=True, size=size + 2 * PIECE)
        stack.callback(shared.unlink)
        stack.callback(shared.close)
        floor = Floor(copying, shared.name, size)
        stack.callback(floor.end)
        engines.refitter.refit()  # not the first refit, before which the engine has no model
        check_weights(policy, engines, folder / "saved")
        for order in COPIES:
            floor.run(order)
            sums = floor.ask("sum")
            assert sums[0] == sums[1], order
        probes = Probes(COUNT, range(512), SamplingParams(), bound=0.02, positions=64)
        proven = Refitter(policy, lambda: engines.client.engines, engines.config.refit, probes, "ipc")
        contenders = {
            IPC: lambda: float(engines.refitter.refit().size),
            PROVEN: lambda: float(proven.refit().size),
            PROBES: partial(_probe, policy, engines, probes, size),
            FORWARD: partial(_forward, plain_model(folder / "model"), probes, size),
            **{order: partial(_timed, floor, order, size) for order in (*COPIES, WRITE, CHECKED)},
        }
        results["shared memory"] = interleave(contenders, rounds, warmup=2, clock=clock)
    with ExitStack() as stack:
        policy, engines = stack.enter_context(refitting(folder / "model", tokenizer, "collective"))
        for _ in range(2):
            engines.refitter.refit()
        check_weights(policy, engines, folder / "saved-again")
        floor = Floor(broadcasting, f"file://{folder}/meeting", size)
        stack.callback(floor.end)
        floor.run(BROADCAST)
        sums = floor.ask("sum")
        assert sums[0] == sums[1]
        contenders = {
            COLLECTIVE: lambda: float(engines.refitter.refit().size),
            BROADCAST: partial(_timed, floor, BROADCAST, size),
        }
        results["process group"] = interleave(contenders, rounds, warmup=2, clock=clock)
    return results, size


def _probe(policy: Policy, engines: InspectedEngines, probes: Probes, size: int) -> float:
    version = engines.refitter.require_committed()
    calls = RefitCalls(policy.worker_group, engines.client.engines, 60.0)
    calls.on_engines(GenerationEngine.release, tags=("kv_cache",))  # the prefixes of the round before
    asked = probes.of_version(version)
    expecting = calls.start_trainer(PolicyWorker.get_next_token_logprobs, data=asked.prompts)
    asked.ask(calls, 60.0).compare(calls.of_trainer(expecting)[0])
    return float(size)


def plain_model(path: Path) -> Any:
    """The model of the trainer and the engine, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def _forward(model: Any, probes: Probes, size: int) -> float:
    prompts = torch.cat([request.prompt_ids for request in probes.of_version(1).requests])
    assert model(input_ids=prompts[None, :64], use_cache=False, logits_to_keep=COUNT).logits.shape[1] == COUNT
    return float(size)


def cpu_seconds() -> float:
    """CPU time so far of this process and all that it started, of all threads."""
    spent, waiting = 0, [os.getpid()]
    while waiting:
        for thread in Path(f"/proc/{waiting.pop()}/task").glob("*"):
            with suppress(OSError):  # it has ended
                spent += int((thread / "schedstat").read_text().split()[0])
                waiting += map(int, (thread / "children").read_text().split())
    return spent / 1e9


def _timed(floor: Floor, order: str, size: int) -> float:
    floor.run(order)
    return float(size)


def report(results: Mapping[str, Timings]) -> str:
    """A row for each transport and floor."""
    rows = [["ours", "floor", "ours GiB/s", "floor GiB/s", "time ratio (quartiles)", "share of the floor's speed"]]
    for ours, floor in PAIRS:
        timings = next(timings for timings in results.values() if ours in timings.seconds)
        speeds = [f"{timings.rate(name) / 2**30:.2f}" for name in (ours, floor)]
        ratio = timings.ratio(ours, floor)
        rows.append([ours, floor, *speeds, str(ratio), f"{100 / ratio.median:.0f}%"])
    return table(rows)


def proof(results: Mapping[str, Timings]) -> dict[str, float]:
    """The cost of checksums and probes: the former as a share of the refit, the latter in forwards; medians."""
    timings = next(timings for timings in results.values() if IPC in timings.seconds)
    refits, plain, checked, probes, forwards = (
        timings.seconds[name] for name in (IPC, WRITE, CHECKED, PROBES, FORWARD)
    )
    return {
        "checksums_of_refit": median((c - p) / r for r, p, c in zip(refits, plain, checked, strict=True)),
        "probes_of_forward": median(p / f for p, f in zip(probes, forwards, strict=True)),
    }


def as_json(results: Mapping[str, Timings], size: int, rounds: int, clock: str) -> dict[str, Any]:
    cases = []
    for ours, floor in PAIRS:
        timings = next(timings for timings in results.values() if ours in timings.seconds)
        ratio = timings.ratio(ours, floor)
        speeds = {name: timings.rate(name) for name in (ours, floor)}
        cases.append(
            {
                "ours": ours,
                "floor": floor,
                "bytes_per_second": speeds,
                "ratio": asdict(ratio),
                "share": 1 / ratio.median,
            }
        )
    seconds = {name: values for timings in results.values() for name, values in timings.seconds.items()}
    found = {"machine": machine(), "clock": clock, "bytes": size, "rounds": rounds, "proof": proof(results)}
    return {**found, "cases": cases, "seconds": seconds}


CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": cpu_seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=400, help="approximate size of the weights (default 400)")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (default 15)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="time that is measured (default wall)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE as JSON")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.mebibytes < 1:
        parser.error("--rounds and --mebibytes must be 1 or more")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        results, size = measure(arguments.mebibytes, arguments.rounds, Path(directory), CLOCKS[arguments.clock])
    found = machine()
    print(f"{found['cpu']}, {found['cores']} cores, load {found['load_average']}, torch {found['torch']}")
    print(f"{size / 2**20:.0f} MiB of weights in fp32, {arguments.clock} time; both sides gave the same bytes")
    costs = proof(results)
    print("", report(results), "", sep="\n")
    print(f"checksums: {100 * costs['checksums_of_refit']:.0f}% of the refit; ", end="")
    print(f"probes: {costs['probes_of_forward']:.2f} forwards")
    if arguments.json:
        write_json(arguments.json, as_json(results, size, arguments.rounds, arguments.clock))


if __name__ == "__main__":
    main()

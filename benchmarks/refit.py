"""Speed of sending weights from the trainer to a generation engine in another process, including checksums.

    python benchmarks/refit.py [--mebibytes 400] [--rounds 15] [--clock wall] [--json FILE]

A trainer (dtensor, one worker process, a Llama in fp32) and one generation worker (the transformers engine, in its own
process), as in a run; each round is a whole refit, from the driver's call until the version is committed. The weights
are copied into the engine's own memory. `refit` is proven by checksums, of what arrived and of what is held; `proven
refit` also by probes, and `probes` is the time of these alone: three tokens sampled by the engine after each of six
prompts, without cached prefixes as after a refit, and then the trainer's forward of prompts and tokens. Floors, with
the same number of bytes:

- `bare copy`: two processes with mapped shared memory. One copies all bytes of a tensor in and signals, the other
  copies them out into its own tensor, each with one `copy_`. No names, no checksums.
- `bare copy, memcpy`: the same with numpy's copy, which is the C library's: for this many bytes it bypasses the caches,
  which is impossible while computing a checksum.
- `bare copy, overlapped` and `bare memcpy, overlapped`: the same in chunks of 32 MiB with two alternating
  buffers, so that one process copies in while the other copies out, on two cores.
- `bare write`: one process copies all bytes into the shared memory with one `copy_`, and signals: a refit that leaves
  the weights in the engine's memory, without names, proof or calls.
- `bare write, checksums`: the same in parts of 128 MiB with checksums as in a refit: the writer's of its source, while
  in the cache, and the reader's of each part that has arrived. What it takes longer than `bare write` is their cost.
- `bare broadcast`: one `torch.distributed.broadcast` of all bytes between two processes over gloo.
- `one forward`: a plain transformers model in the driver's process computes one row with as many tokens as the probes
  have with their completions, and the logits of as many of them as are sampled.

First it checks that all sides give the same bytes. Rounds are interleaved. `--clock wall` measures wall-clock time,
which needs idle cores: several processes take part. `--clock cpu` adds up the CPU time of all processes, which depends
less on other programs, and is not what a run waits for. A ratio is our time / floor, median (quartiles); the share is
its inverse, our speed relative to the floor's.
"""

from __future__ import annotations

import argparse
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

import torch
from interleave import Timings, interleave, machine, table, write_json
from refit_floors import BROADCAST, CHECKED, CHUNK, COPIES, WRITE, Floor, broadcasting, copying

from rlframework import create_manager, load_config
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.generation import GenerationEngine, SamplingParams
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.policy.client import Policy
from rlframework.weight_sync.calls import RefitCalls
from rlframework.weight_sync.coordinator import Refitter
from rlframework.weight_sync.probes import ProbeRequests, Probes
from rlframework.weight_sync.proof import NoiseBound
from rlframework_conformance.policies import InspectedEngines

IPC, COLLECTIVE = "refit, ipc", "refit, collective"
PROVEN, PROBES = "proven refit, ipc", "probes"
FORWARD = "one forward"
COUNT = 6  # probes
HELD = "rlframework_conformance.inspected_worker:held_weights"
PAIRS = (
    *((IPC, order) for order in (*COPIES, WRITE, CHECKED)),
    (CHECKED, WRITE),
    (COLLECTIVE, BROADCAST),
    (PROVEN, IPC),
    (PROBES, IPC),
    (PROBES, FORWARD),
)


def make_model(path: Path, mebibytes: int) -> Any:
    """A Llama of about this size in fp32, with layers of 48 MiB, or smaller ones for a small size."""
    tokenizer = character_tokenizer([chr(0x4E00 + index) for index in range(510)])
    hidden = 1024 if mebibytes >= 100 else 128
    each = (4 * hidden * hidden + 3 * hidden * 4 * hidden) * 4 / 2**20
    layers = max(1, round(mebibytes / each))
    make_llama(path, tokenizer, hidden=hidden, layers=layers, heads=8, init_std=0.02)
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
    from rlframework_conformance.policies import weights_of

    held = engines.inspect(HELD)[0]
    for name, weight in weights_of(policy, folder).items():
        assert torch.equal(held[name].view(torch.uint8), weight.view(torch.uint8)), name


def measure(mebibytes: int, rounds: int, folder: Path, clock: Callable[[], float]) -> tuple[dict[str, Timings], int]:
    """Measure all contenders; return the timings and the bytes of a refit."""
    tokenizer = make_model(folder / "model", mebibytes)
    results: dict[str, Timings] = {}
    with ExitStack() as stack:
        contenders, size = through_memory(stack, folder, tokenizer)
        results["shared memory"] = interleave(contenders, rounds, warmup=2, clock=clock)
    with ExitStack() as stack:
        contenders = over_group(stack, folder, tokenizer)
        results["process group"] = interleave(contenders, rounds, warmup=2, clock=clock)
    return results, size


Contenders = dict[str, Callable[[], float]]
"""Each returns the bytes that it moved, or those of a refit."""


def through_memory(stack: ExitStack, folder: Path, tokenizer: Any) -> tuple[Contenders, int]:
    """A refit through shared memory, its proof and their floors; return them and the bytes of a refit."""
    policy, engines = stack.enter_context(refitting(folder / "model", tokenizer, "ipc"))
    size = engines.refitter.refit().size
    shared = shared_memory.SharedMemory(create=True, size=size + 2 * CHUNK)
    stack.callback(shared.unlink)
    stack.callback(shared.close)
    floor = Floor(copying, shared.name, size)
    stack.callback(floor.end)
    engines.refitter.refit()  # not the first refit, before which the engine has no model
    check_weights(policy, engines, folder / "saved")
    for order in COPIES:
        floor.ask(order)
        sums = floor.ask("sum")
        assert sums[0] == sums[1], order
    probes = Probes(COUNT, range(512), SamplingParams(), NoiseBound(1e-3, headroom=10.0), batch_size=256)
    proven = Refitter(policy, lambda: engines.client.engines, engines.config.refit, probes, "ipc")
    return {
        IPC: lambda: float(engines.refitter.refit().size),
        PROVEN: lambda: float(proven.refit().size),
        PROBES: partial(_probe, policy, engines, probes, size),
        FORWARD: partial(_forward, plain_model(folder / "model"), probes, size),
        **{order: partial(_timed, floor, order, size) for order in (*COPIES, WRITE, CHECKED)},
    }, size


def over_group(stack: ExitStack, folder: Path, tokenizer: Any) -> Contenders:
    """A refit over a process group, and its floor."""
    policy, engines = stack.enter_context(refitting(folder / "model", tokenizer, "collective"))
    for _ in range(2):
        size = engines.refitter.refit().size
    check_weights(policy, engines, folder / "saved-again")
    floor = Floor(broadcasting, f"file://{folder}/meeting", size)
    stack.callback(floor.end)
    floor.ask(BROADCAST)
    sums = floor.ask("sum")
    assert sums[0] == sums[1]
    return {
        COLLECTIVE: lambda: float(engines.refitter.refit().size),
        BROADCAST: partial(_timed, floor, BROADCAST, size),
    }


def _probe(policy: Policy, engines: InspectedEngines, probes: Probes, size: int) -> float:
    version = engines.refitter.require_committed()
    calls = RefitCalls(policy.worker_group, engines.client.engines, 60.0)
    calls.on_engines(GenerationEngine.release, tags=("kv_cache",))  # the prefixes of the round before
    answers = _usual(probes, version).ask(calls, 60.0)
    scored = calls.on_trainer(PolicyWorker.get_logprobs, data=answers.rows, positions="token_mask")
    answers.compare(scored[0]["logprobs"])
    return float(size)


def _usual(probes: Probes, version: int) -> ProbeRequests:
    """The probes of most refits: a thorough one, which has more of them, is passed over."""
    return next(asked for _ in range(3) if len((asked := probes.of_version(version)).requests) == COUNT)


def plain_model(path: Path) -> Any:
    """The model of the trainer and the engine, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def _forward(model: Any, probes: Probes, size: int) -> float:
    requests = _usual(probes, 1).requests
    sampled = sum(request.max_new_tokens for request in requests)
    row = torch.arange(sampled + sum(len(request.prompt_ids) for request in requests)) % 512
    assert model(input_ids=row[None], use_cache=False, logits_to_keep=sampled).logits.shape[1] == sampled
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
    floor.ask(order)
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

"""Speed and memory of log-probabilities and training compared with a plain torch + transformers loop.

    python benchmarks/policy.py [--pairs 7] [--backend dtensor] [--lengths even tailed] [--json FILE]
    python benchmarks/policy.py --backend deepspeed --keys zero_optimization.stage=3
    python benchmarks/policy.py --device cuda --shape qwen-0.5b --rows 64 --longest 4096 --precision bfloat16

The plain loop uses the backend's own engine if there is one: for `deepspeed` it is a bare DeepSpeed program.

Work: one optimizer step on, and the log-probabilities of, 32 rows (about 3,000 tokens), a quarter of each a prompt that
the loss excludes; by default on a random Llama of 4 layers x 256, vocabulary 2,048, in fp32, on one thread. Lengths are
`even` (12 to 175) or `tailed` (exponential: most are short, few are long, like a policy's answers). They alone
determine how much of the plain loop's work is padding, which is printed; a framework can save only this and the head on
the prompt.

First it checks that both sides compute the same values. Then interleaved rounds; CPU time of the process on a CPU,
wall-clock time on a GPU; below 1 rlframework is faster. The sides differ: the plain loop computes logits at every
position, the framework only where the mask selects them (`positions="token_mask"`).

Peak memory of one training step is the maximum of the process (or the GPU) less the memory in use before. For the head
alone, at a vocabulary of 150,000, it is measured with full logits and in chunks, each in its own process.

On a GPU, model FLOPs utilisation: 6 FLOPs per weight and token (2 in scoring), the head where it runs, and the causal
half of attention, per time; relative to the rate of a matrix product of 8,192 x 8,192 in bf16 on the same GPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from interleave import Timings, interleave, machine, table, write_json
from memory import head_memory, peak_bytes
from plain import Rows
from work import (
    BARE,
    PADDED,
    SHAPES,
    SORTED,
    as_batch,
    check_same,
    make_loop,
    make_model,
    make_policy,
    make_rows,
    matrix_product_flops,
    padded_tokens,
)

from rlframework.algorithms.losses import NLLLoss
from rlframework_conformance.sections import parse_section

MODES = ("padded", "dynamic", "packed")
LOOPS = {PADDED: "padded", SORTED: "sorted"}


@dataclass
class Measured:
    """Results for one kind of lengths. `peaks`: bytes of a training step by contender; `share`: see `utilisation`."""

    rows: Rows
    checks: list[str] = field(default_factory=list)
    timings: dict[str, Timings] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)


def measure(model: Path, tokenizer: Any, rows: Rows, arguments: argparse.Namespace) -> Measured:
    """Measure each mode of the framework and both plain loops."""
    device, precision = arguments.device, arguments.precision
    batch, loss, found = as_batch(rows), NLLLoss(), Measured(rows)
    with ExitStack() as stack:
        keys = {"backend": arguments.backend, "device": device, "precision": precision, "rows": len(rows.lengths)}
        section = parse_section(arguments.keys)
        own = {arguments.backend: section} if section else {}
        policies = {
            f"rlframework {mode}": stack.enter_context(make_policy(model, tokenizer, mode, **keys, **own))
            for mode in arguments.modes
        }
        slack = 1.0 if precision == "float32" else 1e3  # bfloat16 has 3 digits
        for name, policy in policies.items():
            with make_loop(model, "sorted", **keys, section=section) as loop:
                found.checks += check_same(policy, name, loop, rows, slack)
        loops = {
            name: stack.enter_context(make_loop(model, order, **keys, section=section)) for name, order in LOOPS.items()
        }
        scoring = {
            name: lambda policy=policy: policy.get_logprobs(batch, positions="token_mask")
            for name, policy in policies.items()
        } | {name: lambda loop=loop: loop.get_logprobs(rows).cpu() for name, loop in loops.items()}
        training = {name: lambda policy=policy: policy.train(batch, loss) for name, policy in policies.items()} | {
            name: lambda loop=loop: loop.train(rows) for name, loop in loops.items()
        }
        clock = time.perf_counter if device == "cuda" else time.process_time
        for work, contenders in (("log-probabilities", scoring), ("training", training)):
            counted = {name: _counted(run, rows) for name, run in contenders.items()}
            found.timings[work] = interleave(counted, arguments.pairs, clock=clock)
        found.peaks = {name: peak_bytes(run, device) for name, run in training.items()}
        for work, evaluates in (("log-probabilities", True), ("training", False)):
            found.flops[work] = next(iter(policies.values())).train(batch, loss, eval_mode=evaluates)["flops"]
    return found


def _counted(run: Callable[[], Any], rows: Rows) -> Callable[[], float]:
    def counted() -> float:
        run()
        return float(rows.lengths.sum())

    return counted


def report(lengths: str, found: Measured, peak_flops: float | None) -> str:
    """A row per workload and opponent."""
    names = [name for name in found.peaks if name not in LOOPS]
    rows = [["lengths", "work", "mode", "tok/s", "against padded loop", "against sorted loop", "MFU"]]
    for work, timings in found.timings.items():
        for name in names:
            share = "-" if peak_flops is None else f"{utilisation(found, work, name, peak_flops):.0%}"
            ratios = [str(timings.ratio(name, other)) for other in LOOPS]
            rows.append([lengths, work, name, f"{timings.rate(name):,.0f}", *ratios, share])
    peaks = ", ".join(f"{name} {peak / 2**20:,.0f} MiB" for name, peak in found.peaks.items())
    return f"{table(rows)}\npeak memory of a training step: {peaks}"


def utilisation(found: Measured, work: str, name: str, peak_flops: float) -> float:
    """The model's FLOPs per second relative to those of the matrix product."""
    seconds = float(found.rows.lengths.sum()) / found.timings[work].rate(name)
    return found.flops[work] / seconds / peak_flops


def describe(lengths: str, rows: Rows) -> str:
    tokens = int(rows.lengths.sum())
    padding = ", ".join(f"{order} {padded_tokens(rows, order) / tokens:.2f}" for order in LOOPS.values())
    return (
        f"{lengths}: {len(rows.lengths)} rows, {tokens} tokens, {int(rows.mask[:, 1:].sum())} of them in the loss; "
        f"the plain loops compute these multiples of them: {padding}"
    )


def as_json(found: Measured) -> dict[str, Any]:
    return {
        "checks": found.checks,
        "peak_bytes": found.peaks,
        "flops": found.flops,
        "results": {
            work: {
                "tokens_per_second": {name: timings.rate(name) for name in timings.seconds},
                "time_ratio": {
                    name: {other: asdict(timings.ratio(name, other)) for other in LOOPS}
                    for name in timings.seconds
                    if name not in LOOPS
                },
                "seconds": timings.seconds,
            }
            for work, timings in found.timings.items()
        },
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--backend", default="dtensor", help="policy.backend; selects the plain loop too (dtensor)")
    parser.add_argument(
        "--keys", nargs="+", default=[], metavar="KEY=VALUE", help="settings of policy.<backend> and the plain loop"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="policy.batching.mode (default all)")
    parser.add_argument("--lengths", nargs="+", choices=("even", "tailed"), default=("even", "tailed"))
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0], help="of the model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--longest", type=int, default=175, help="the longest row of `even` lengths")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--head", action=argparse.BooleanOptionalAction, default=True, help="measure the head's memory")
    parser.add_argument("--vocabulary", type=int, default=150_000, help="vocabulary of that head (default 150,000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE as JSON")
    arguments = parser.parse_args()
    if min(arguments.pairs, arguments.rows) < 1 or arguments.longest < 12:
        parser.error("--pairs and --rows must be 1 or more, --longest 12 or more")
    return arguments


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    found: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        tokenizer = make_model(model, arguments.shape, longest=max(512, 3 * arguments.longest))
        for lengths in arguments.lengths:
            rows = make_rows(lengths, arguments.rows, arguments.longest)
            print(describe(lengths, rows), flush=True)
            found[lengths] = measure(model, tokenizer, rows, arguments)
    peak_flops = matrix_product_flops("cuda") if arguments.device == "cuda" else None
    head = head_memory(arguments.vocabulary, arguments.device) if arguments.head else {}
    here = machine()
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{here['cpu']}, {here['threads']} thread"
    print(
        f"{where}, torch {here['torch']}, transformers {here['transformers']}, {arguments.precision}, "
        f"{arguments.shape}; {' '.join((arguments.backend, *arguments.keys))} against a plain loop of "
        f"{BARE.get(arguments.backend, 'torch')}"
    )
    for lengths, one in found.items():
        print(*one.checks, "", report(lengths, one, peak_flops), "", sep="\n")
    for name, size in head.items():
        print(
            f"log-probabilities of 1,024 tokens and their backward, vocabulary {arguments.vocabulary:,}, {name}: "
            f"{size / 2**20:,.0f} MiB"
        )
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key != "json"}
        results = {lengths: as_json(one) for lengths, one in found.items()}
        write_json(
            arguments.json,
            {
                "machine": here | {"device": where},
                "settings": settings,
                "matrix_product_flops": peak_flops,
                "head_bytes": head,
                "lengths": results,
            },
        )


if __name__ == "__main__":
    main()

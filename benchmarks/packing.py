"""Measure packing: how full the bins are, how long it takes, and how long ranks wait for each other.

    python benchmarks/packing.py [--gsm8k train.jsonl [--tokenizer DIR]] [--pairs 15] [--json FILE] [--plot FILE]

Lengths: GSM8K's rows (question and answer), counted with a tokenizer or, without one, as words and punctuation marks;
and 4,096 and 16,384 lengths exp(N(6.5, 1)) from seed 0, clipped to 32..8,192. Bins hold 8,192 tokens; their number is a
multiple of 8, the number of ranks. Costs are `TokenCost()`: linear plus attention at hidden size 2,048.

First it checks every packing (each row once, no bin over the cap), and compares first fit decreasing with a plain scan
over all bins. Then interleaved rounds measure CPU time of the process; ratios are to our first fit decreasing, below 1
is faster. Imported objects are exempt from garbage collection, which would scan them between rounds and leave cold
caches, a disadvantage for code with more distinct calls.

- bound: no packing with a multiple of 8 bins can have fewer (the sum of the tokens).
- spread: (largest - smallest) / mean of the costs of the 8 ranks.
- slowest/mean: all ranks wait for the slowest one in each step; the sum of its costs over the steps, divided by the
  mean rank's. If a single row costs more than the mean step of a small batch, no packing reaches 1.
- slowest/round robin's: that sum, divided by the sum of dynamic batches assigned round robin (for small batches: of
  first fit decreasing assigned so). Round robin gives all ranks the same shapes at the price of padding.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from interleave import Timings, interleave, machine, table, write_json

from rlframework.batch.packing import (
    PackingAlgorithm,
    TokenCost,
    balanced_microbatches,
    get_packer,
    round_robin_microbatches,
)

CAPACITY, RANKS, COST = 8192, 8, TokenCost()
FFD, MFFD, BALANCED = (
    PackingAlgorithm.FIRST_FIT_DECREASING.value,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING.value,
    PackingAlgorithm.BALANCED.value,
)
GOALS = {"time against FFD": 1.0, "spread": 0.02, "slowest/mean": 1.05}


@dataclass(frozen=True)
class Waiting:
    """The imbalance of 8 ranks with costs `[rank, step]`."""

    spread: float
    slowest: float
    total: float
    """The slowest rank's cost, in tokens, summed over the steps."""

    @classmethod
    def of(cls, costs: np.ndarray[Any, Any]) -> Waiting:
        ranks = costs.sum(axis=1)
        total = float(costs.max(axis=0).sum())
        return cls(float((ranks.max() - ranks.min()) / ranks.mean()), float(total / ranks.mean()), total)


def lognormal(rows: int, seed: int = 0) -> list[int]:
    """`rows` lengths exp(N(6.5, 1)), clipped to 32..8,192."""
    drawn = np.exp(np.random.default_rng(seed).normal(6.5, 1.0, rows))
    lengths: list[int] = np.clip(drawn, 32, 8192).astype(int).tolist()
    return lengths


def gsm8k_lengths(path: Path, tokenizer: Path | None) -> tuple[str, list[int]]:
    """The unit of the lengths, and the lengths of all rows of a GSM8K file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    texts = [f"{row['question']}\n{row['answer']}" for row in rows]
    if tokenizer is None:
        return "words and punctuation marks", [len(re.findall(r"\w+|[^\w\s]", text)) for text in texts]
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(tokenizer)(texts, add_special_tokens=False)["input_ids"]
    return "tokens", [len(row) for row in tokens]


def packer(name: str, **options: Any) -> Any:
    return get_packer(name, CAPACITY, bin_count_multiple=RANKS, seed=0, **options)


def costs_of(dealt: Sequence[Sequence[Sequence[int]]], lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The costs `[rank, step]` of bins."""
    rows = COST.of_rows(lengths)
    return np.array([[rows[list(bin_)].sum() for bin_ in bins] for bins in dealt])


def check(name: str, bins: list[list[int]], lengths: list[int]) -> None:
    """Exit if the packing is invalid."""
    if sorted(row for rows in bins for row in rows) != list(range(len(lengths))) or len(bins) % RANKS:
        sys.exit(f"{name} lacks or repeats a row, or its bins are no multiple of {RANKS}")
    if max(sum(lengths[row] for row in rows) for rows in bins) > CAPACITY:
        sys.exit(f"{name} has a bin over {CAPACITY} tokens")


def check_first_fit(lengths: list[int]) -> str:
    """Check first fit decreasing against a plain scan for the first bin with room, for each row, longest first."""
    room: list[int] = []
    bins: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (lengths[row], row), reverse=True):
        place = next((number for number, free in enumerate(room) if free >= lengths[row]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(CAPACITY)
        bins[place].append(row)
        room[place] -= lengths[row]
    if get_packer(FFD, CAPACITY).pack(lengths) != bins:
        sys.exit("first fit decreasing differs from a plain scan over the bins")
    return f"first fit decreasing has the bins of a plain scan ({len(bins)})"


def timed(work: Callable[[], Any]) -> Callable[[], float]:
    def run() -> float:
        work()
        return 1.0

    return run


def milliseconds(timings: Timings, name: str) -> float:
    return 1000.0 / timings.rate(name)


def measure_packing(lengths: list[int], pairs: int) -> list[dict[str, Any]]:
    """A record per algorithm and assignment."""
    values, records = np.array(lengths), []
    packers = {algorithm.value: packer(algorithm.value) for algorithm in PackingAlgorithm}
    packed = {name: one.pack(lengths) for name, one in packers.items()}
    work = {name: timed(lambda one=one: one.pack(lengths)) for name, one in packers.items()}  # type: ignore[misc]
    bound = math.ceil(sum(lengths) / CAPACITY / RANKS) * RANKS
    for name, bins in packed.items():
        check(name, bins, lengths)
        timings = interleave({name: work[name], FFD: work[FFD]}, pairs)
        dealing = interleave({name: timed(lambda: packers[name].assign_to_shards(bins, lengths, RANKS))}, pairs)  # noqa: B023
        ways = {"round robin": [bins[rank::RANKS] for rank in range(RANKS)]}
        if name == BALANCED:
            ways["by cost"] = packers[name].assign_to_shards(bins, lengths, RANKS)
        for way, dealt in ways.items():
            records.append(
                {
                    "algorithm": name,
                    "deal": way,
                    "bins": len(bins),
                    "bound": bound,
                    "utilisation": sum(lengths) / len(bins) / CAPACITY,
                    "pack_ms": milliseconds(timings, name),
                    "time_ratio": asdict(timings.ratio(name, FFD)),
                    "deal_ms": milliseconds(dealing, name),
                    **asdict(Waiting.of(costs_of(dealt, values))),
                }
            )
    return records


def measure_dynamic(lengths: list[int], max_tokens: int, pairs: int) -> list[dict[str, Any]]:
    """A record for the usual method and for ours; rows beyond a multiple of the ranks are dropped."""
    lengths = lengths[: len(lengths) // RANKS * RANKS]
    values = np.array(lengths)
    ours = balanced_microbatches(lengths, max_tokens, shards=RANKS, cost=COST)
    _, bounds, longest = round_robin_microbatches(lengths, max_tokens, shards=RANKS)
    shapes = {
        "round robin": [[(end - start, width) for (start, end), width in zip(bounds, longest, strict=True)]] * RANKS,
        "balanced": [[(len(rows), int(values[rows].max())) for rows in steps] for steps in ours],
    }
    timings = interleave(
        {
            "round robin": timed(lambda: round_robin_microbatches(lengths, max_tokens, shards=RANKS)),
            "balanced": timed(lambda: balanced_microbatches(lengths, max_tokens, shards=RANKS, cost=COST)),
        },
        pairs,
    )
    records = []
    for name, steps in shapes.items():
        if max(count * width for shard in steps for count, width in shard) > max_tokens:
            sys.exit(f"{name} has a microbatch over {max_tokens} tokens")
        padded = sum(count * width for shard in steps for count, width in shard)
        costs = np.array([[count * float(COST.of_rows(width)) for count, width in shard] for shard in steps])
        records.append(
            {
                "algorithm": name,
                "max_tokens": max_tokens,
                "microbatches": len(steps[0]),
                "padding": padded / sum(lengths) - 1.0,
                "ms": milliseconds(timings, name),
                **asdict(Waiting.of(costs)),
            }
        )
    for record in records:
        record["step"] = record["total"] / records[0]["total"]
    return records


def measure_small(rows: int, batches: int) -> dict[str, Any]:
    """Means over batches of few rows, which have only one or two steps."""
    found: dict[str, list[Waiting]] = {FFD: [], BALANCED: []}
    steps = []
    for seed in range(batches):
        lengths = lognormal(rows, seed)
        for name, waits in found.items():
            one = packer(name)
            dealt = one.assign_to_shards(one.pack(lengths), lengths, RANKS)
            waits.append(Waiting.of(costs_of(dealt, np.array(lengths))))
        steps.append(len(dealt[0]))
    means = {name: float(np.mean([wait.slowest for wait in waits])) for name, waits in found.items()}
    totals = [b.total / a.total for a, b in zip(found[FFD], found[BALANCED], strict=True)]
    return {"rows": rows, "steps": float(np.mean(steps)), "step": float(np.mean(totals)), **means}


def measure_growth(sizes: Sequence[int], pairs: int) -> list[dict[str, Any]]:
    """CPU time by the number of rows, absolute and per n log2 n."""
    records = []
    for rows in sizes:
        lengths = lognormal(rows)
        work = {name: timed(lambda name=name: packer(name).pack(lengths)) for name in (FFD, BALANCED)}  # type: ignore[misc] # noqa: B023
        timings = interleave(work, pairs)
        spent = {name: milliseconds(timings, name) for name in work}
        each = {f"{name} ns": 1e6 * spent[name] / (rows * math.log2(rows)) for name in work}
        records.append({"rows": rows, **spent, **each})
    return records


def packing_table(records: list[dict[str, Any]]) -> str:
    head = ["algorithm", "deal", "bins", "bound", "full", "pack ms", "time/FFD (quartiles)", "deal ms", "spread"]
    rows = [[*head, "slowest/mean"]]
    for record in records:
        ratio = record["time_ratio"]
        rows.append(
            [
                record["algorithm"],
                record["deal"],
                str(record["bins"]),
                str(record["bound"]),
                f"{record['utilisation']:.2%}",
                f"{record['pack_ms']:.2f}",
                f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
                f"{record['deal_ms']:.2f}",
                f"{record['spread']:.2%}",
                f"{record['slowest']:.4f}",
            ]
        )
    return table(rows)


def dynamic_table(records: list[dict[str, Any]]) -> str:
    head = ["microbatches", "cap", "a rank", "padding", "spread", "slowest/mean", "slowest/round robin's", "ms"]
    rows = [
        [
            record["algorithm"],
            f"{record['max_tokens']:,}",
            str(record["microbatches"]),
            f"{record['padding']:.2%}",
            f"{record['spread']:.2%}",
            f"{record['slowest']:.4f}",
            f"{record['step']:.3f}",
            f"{record['ms']:.2f}",
        ]
        for record in records
    ]
    return table([head, *rows])


def goals(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The goals of `balanced`, the measurements, and whether they were reached."""
    by_name = {(record["algorithm"], record["deal"]): record for record in records}
    ours, other = by_name[BALANCED, "by cost"], by_name[MFFD, "round robin"]
    measured = {
        "bins against MFFD": (ours["bins"], other["bins"]),
        "time against FFD": (ours["time_ratio"]["median"], GOALS["time against FFD"]),
        "spread": (ours["spread"], GOALS["spread"]),
        "slowest/mean": (ours["slowest"], GOALS["slowest/mean"]),
    }
    return {name: {"measured": got, "at most": most, "reached": got <= most} for name, (got, most) in measured.items()}


def plot(path: Path, lengths: list[int]) -> None:
    """Plot costs by step (x) and rank (y), round robin next to balanced, with the same scale."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(2, 1, figsize=(11, 5), layout="constrained")
    costs = {}
    for name in (FFD, BALANCED):
        one = packer(name)
        costs[name] = costs_of(one.assign_to_shards(one.pack(lengths), lengths, RANKS), np.array(lengths))
    low, high = min(values.min() for values in costs.values()), max(values.max() for values in costs.values())
    for panel, (name, values) in zip(panels, costs.items(), strict=True):
        image = panel.imshow(values, aspect="auto", vmin=low, vmax=high, interpolation="nearest")
        waits = Waiting.of(values)
        way = "by cost" if name == BALANCED else "round robin"
        panel.set_title(f"{name}, {way}: slowest/mean {waits.slowest:.3f}, spread {waits.spread:.2%}")
        panel.set_ylabel("rank")
    panels[-1].set_xlabel("step")
    figure.colorbar(image, ax=panels, label="cost of the bin (tokens)")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, metavar="FILE", help="GSM8K's train.jsonl; omitted by default")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="directory of a Hugging Face tokenizer")
    parser.add_argument("--pairs", type=int, default=15, help="interleaved rounds (default 15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot cost by step and rank to FILE (png, svg, pdf)")
    parser.add_argument("--small", action="store_true", help="only 512 lengths and few rows, to test the program")
    arguments = parser.parse_args()
    if arguments.pairs < 1:
        parser.error("--pairs must be 1 or more")
    sets = {f"{rows:,} lengths": lognormal(rows) for rows in ((512,) if arguments.small else (4096, 16_384))}
    if arguments.gsm8k:
        unit, lengths = gsm8k_lengths(arguments.gsm8k, arguments.tokenizer)
        sets = {f"GSM8K, {len(lengths):,} rows, lengths in {unit}": lengths, **sets}
    found, results = machine(), {}
    gc.freeze()
    print(f"{found['cpu']}, Python {found['python']}, load {found['load_average']}")
    for name, lengths in sets.items():
        print(f"\n{name}: {sum(lengths):,} tokens, mean {np.mean(lengths):.0f}, longest {max(lengths):,}")
        print(check_first_fit(lengths))
        packing = measure_packing(lengths, arguments.pairs)
        dynamic = [
            record for cap in (CAPACITY, 4 * CAPACITY) for record in measure_dynamic(lengths, cap, arguments.pairs)
        ]
        results[name] = {"packing": packing, "dynamic": dynamic, "goals": goals(packing)}
        print(packing_table(packing), "", dynamic_table(dynamic), "", sep="\n")
        for goal, one in results[name]["goals"].items():
            print(f"  {goal}: {one['measured']:.4g}, at most {one['at most']:.4g}: {'yes' if one['reached'] else 'NO'}")
    small = [measure_small(rows, 2 if arguments.small else 20) for rows in (64, 128, 256)]
    print("\nSmall batches: slowest/mean, mean of 20 batches")
    head = ["rows", "steps", f"{FFD}, round robin", BALANCED, "slowest/round robin's"]
    body = [[str(x["rows"]), f"{x['steps']:.1f}", *(f"{x[n]:.3f}" for n in (FFD, BALANCED, "step"))] for x in small]
    print(table([head, *body]))
    growth = measure_growth((512, 1024) if arguments.small else (16_384, 65_536, 262_144), min(arguments.pairs, 5))
    print("\nGrowth: ms, and ns per n log2 n")
    keys = [FFD, f"{FFD} ns", BALANCED, f"{BALANCED} ns"]
    print(table([["rows", *keys], *([f"{x['rows']:,}", *(f"{x[key]:.2f}" for key in keys)] for x in growth)]))
    if arguments.json:
        write_json(arguments.json, {"machine": found, "sets": results, "small": small, "growth": growth})
    if arguments.plot:
        plot(arguments.plot, next(iter(reversed(sets.values()))))


if __name__ == "__main__":
    main()

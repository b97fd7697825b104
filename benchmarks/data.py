"""Overhead of batch operations over the tensor operations that they need.

    python benchmarks/data.py [--sizes 512x2048 16384x4096] [--rounds 7] [--only NAME ...] [--json FILE] [--small]

The batch is that of GRPO: input_ids int64, token_mask, logprobs and advantages fp32 `[B, S]`, input_lengths and
sample_mask `[B]`, a list of texts; above 64 Mi tokens only input_ids, input_lengths, logprobs and the texts, to save
memory. Lengths are exp(N(6.5, 1)), clipped to 32..S. Eight shards.

The floor of each line is plain torch code that gives the same tensors: slices, `torch.cat`, `tensor[rows]`, lists.
Where rows are balanced by length, the floor is given the assignment, so our time includes the planning. Floors of
serialization: the dictionary of tensors, pickled or sent by torch, and a `clone` for each unavoidable copy. First it
checks that both sides give the same result. Rounds are interleaved and measure the CPU time of the process. A ratio is
ours / floor, median (and quartiles) over the rounds. Pipes of `multiprocessing` are not measured: nothing in the
framework sends batches through them, and they carry the bytes in-band, whereas torch uses shared memory.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from interleave import Timings, interleave, machine, table, write_json
from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict

SHARDS, GLOBAL_BATCHES, MICRO_ROWS = 8, 4, 8
FEW_KEYS_FROM = 1 << 26
OURS, FLOOR = "ours", "floor"
Parts = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One line of the table: two implementations with the same result."""

    name: str
    ours: Callable[[], Any]
    floor: Callable[[], Any]


def make_batch(rows: int, width: int) -> BatchedDataDict[Any]:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randn(rows, generator=random).add_(6.5).exp_().long().clamp_(32, width)
    inside = torch.arange(width) < lengths[:, None]
    batch: BatchedDataDict[Any] = BatchedDataDict(
        input_ids=torch.randint(1, 50_000, (rows, width), generator=random).mul_(inside),
        input_lengths=lengths,
        logprobs=torch.rand(rows, width, generator=random).neg_(),
        text=[f"answer {row}" for row in range(rows)],
    )
    if rows * width < FEW_KEYS_FROM:
        batch["token_mask"] = inside.float()
        batch["advantages"] = torch.randn(rows, width, generator=random)
        batch["sample_mask"] = torch.ones(rows)
    return batch


def picked(data: dict[str, Any], rows: Tensor | list[int]) -> dict[str, Any]:
    index = torch.as_tensor(rows)
    return {k: [v[row] for row in index.tolist()] if isinstance(v, list) else v[index] for k, v in data.items()}


def sliced(data: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    return {key: value[start:end] for key, value in data.items()}


def joined(parts: Parts) -> dict[str, Any]:
    return {
        key: [item for part in parts for item in part[key]]
        if isinstance(parts[0][key], list)
        else torch.cat([part[key] for part in parts])
        for key in sorted(parts[0])
    }


def planned(batch: BatchedDataDict[Any], width: int, kind: str) -> dict[str, Any]:
    common = {
        "max_tokens_per_microbatch": 4 * width,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }
    name, _, algorithm = kind.partition(" ")
    if name == "dynamic":
        return {"dynamic_batching_args": {**common, "sequence_length_round": 64, "algorithm": algorithm}}
    return {"sequence_packing_args": {**common, "sequence_length_pad_multiple": 1, "algorithm": algorithm}}


def cases(batch: BatchedDataDict[Any]) -> Iterator[Case]:
    data, size, width = batch.data, batch.size, batch["input_ids"].shape[1]
    each, per_batch = size // SHARDS, size // GLOBAL_BATCHES
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1))

    def plain_blocks(shard: int) -> Parts:
        length = per_batch // SHARDS
        starts = [start + shard * length for start in range(0, size, per_batch)]
        return [sliced(data, start, start + length) for start in starts]

    yield Case(
        "shard: plain",
        lambda: batch.shard_by_batch_size(SHARDS, batch_size=per_batch),
        lambda: [joined(plain_blocks(shard)) for shard in range(SHARDS)],
    )
    for kind in ("dynamic round_robin", "dynamic balanced", "packed modified_first_fit_decreasing", "packed balanced"):
        args = planned(batch, width, kind)
        shards, indices = batch.shard_by_batch_size(SHARDS, **args)
        ends = torch.tensor([shard.size for shard in shards]).cumsum(0).tolist()
        rows = [torch.tensor(indices[end - shard.size : end]) for shard, end in zip(shards, ends, strict=True)]
        first = shards[0]
        del shards
        yield Case(
            f"shard: {kind}",
            lambda args=args: batch.shard_by_batch_size(SHARDS, **args)[0],
            lambda rows=rows: [picked(data, of_shard) for of_shard in rows],
        )
        if kind == "dynamic round_robin":
            yield _dynamic_views(first)
    yield Case("reorder_data", lambda: _reordered(data, order), lambda: picked(data, order.argsort()))
    yield Case(
        "select_indices: half",
        lambda: batch.select_indices(order[: size // 2]),
        lambda: picked(data, order[: size // 2]),
    )
    parts = [sliced(data, start, start + each) for start in range(0, size, each)]
    yield Case("from_batches", lambda: BatchedDataDict.from_batches(parts), lambda: joined(parts))
    ragged = [_narrowed(part, width - 16 * number) for number, part in enumerate(parts)]
    yield Case(
        "from_batches: ragged", lambda: BatchedDataDict.from_batches(ragged), lambda: joined(_padded(ragged, width))
    )
    yield Case("chunk", lambda: batch.chunk(3, SHARDS), lambda: joined([sliced(data, 3 * each, 4 * each)]))
    yield Case(
        "microbatches: views",
        lambda: list(batch.make_microbatch_iterator(MICRO_ROWS)),
        lambda: [sliced(data, start, start + MICRO_ROWS) for start in range(0, size, MICRO_ROWS)],
    )
    yield Case(
        "slice: one view",
        lambda: [batch.slice(8, 16) for _ in range(64)],
        lambda: [sliced(data, 8, 16) for _ in range(64)],
    )


def _dynamic_views(shard: BatchedDataDict[Any]) -> Case:
    ranges, lengths = (shard.micro_batch_indices or [])[0], (shard.micro_batch_lengths or [])[0]
    wide = [key for key, value in shard.items() if isinstance(value, Tensor) and value.ndim == 2]

    def floor() -> Parts:
        parts = [sliced(shard.data, start, end) for start, end in ranges]
        return [part | {k: part[k][:, :length] for k in wide} for part, length in zip(parts, lengths, strict=True)]

    return Case(
        "microbatches: dynamic views", lambda: list(shard.make_microbatch_iterator_with_dynamic_shapes()), floor
    )


def _reordered(data: dict[str, Any], order: Tensor) -> BatchedDataDict[Any]:
    batch: BatchedDataDict[Any] = BatchedDataDict(data)
    batch.reorder_data(order)
    return batch


def _narrowed(part: dict[str, Any], width: int) -> dict[str, Any]:
    return {k: v[:, :width] if isinstance(v, Tensor) and v.ndim == 2 else v for k, v in part.items()}


def _padded(parts: Parts, width: int) -> Parts:
    def pad(value: Any) -> Any:
        wide = isinstance(value, Tensor) and value.ndim == 2
        return torch.nn.functional.pad(value, (0, width - value.shape[1])) if wide else value

    return [{key: pad(value) for key, value in part.items()} for part in parts]


def pickling_cases(batch: BatchedDataDict[Any]) -> Iterator[Case]:
    data = batch.data

    def copies(count: int) -> Any:
        made = data
        for _ in range(count):
            made = {key: list(value) if isinstance(value, list) else value.clone() for key, value in made.items()}
        return made

    def apart() -> Any:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
        stored = [torch.frombuffer(buffer.raw(), dtype=torch.uint8).clone().numpy() for buffer in buffers]
        for array in stored:  # as in Ray: written once, read-only for the reader
            array.setflags(write=False)
        return pickle.loads(head, buffers=stored)  # noqa: S301 - just written

    for protocol in (4, 5):
        ours = lambda protocol=protocol: pickle.loads(pickle.dumps(batch, protocol=protocol))  # noqa: E731, S301
        name = f"pickle and back, protocol {protocol}"
        yield Case(name, ours, lambda protocol=protocol: pickle.loads(pickle.dumps(data, protocol=protocol)))  # noqa: S301
        if protocol == 5:
            yield Case(f"{name}, against 2 clones", ours, lambda: copies(2))
    yield Case("buffers stored apart, against 2 clones", apart, lambda: copies(2))


def check_same(case: Case) -> None:
    """Exit unless both sides of `case` give the same result."""
    sides = []
    for side in (case.ours, case.floor):
        parts = side()
        sides.append(parts if isinstance(parts, list) else [parts])
    for ours, floor in zip(*sides, strict=True):
        if sorted(ours) != sorted(floor):
            sys.exit(f"{case.name}: the two sides have different keys")
        for key, value in floor.items():
            equal = torch.equal(ours[key], value) if isinstance(value, Tensor) else ours[key] == value
            if not equal or (isinstance(value, Tensor) and ours[key].dtype != value.dtype):
                sys.exit(f"{case.name}: the two sides differ in {key}")


def measure(case: Case, rows: int, rounds: int) -> Timings:
    def run(side: Callable[[], Any]) -> Callable[[], float]:
        def timed() -> float:
            side()
            return float(rows)

        return timed

    return interleave({OURS: run(case.ours), FLOOR: run(case.floor)}, rounds)


def run_size(rows: int, width: int, rounds: int, only: list[str]) -> list[dict[str, Any]]:
    batch = make_batch(rows, width)
    found = []

    def add(name: str, timings: Timings) -> None:
        ratio = timings.ratio(OURS, FLOOR)
        seconds = {side: rows / timings.rate(side) for side in (OURS, FLOOR)}
        found.append({"size": f"{rows}x{width}", "case": name, "ratio": ratio.__dict__, "seconds": seconds})
        print(f"{name}: {ratio}", file=sys.stderr)

    for make in (cases, pickling_cases):
        for case in make(batch):
            if not only or any(word in case.name for word in only):
                check_same(case)
                add(case.name, measure(case, rows, rounds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["512x2048", "16384x4096"], metavar="ROWSxTOKENS")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only cases with this in their name")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="64x128 and two rounds, to test the program")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes, rounds = (["64x128"], 2) if args.small else (args.sizes, args.rounds)
    found = [row for size in sizes for row in run_size(*map(int, size.split("x")), rounds, args.only)]
    rows = [["size", "case", "ours ms", "floor ms", "ratio"]]
    for line in found:
        ratio = line["ratio"]
        times = [f"{1e3 * line['seconds'][side]:.3g}" for side in (OURS, FLOOR)]
        rows.append(
            [line["size"], line["case"], *times, f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"]
        )
    print(table(rows))
    if args.json:
        write_json(args.json, {"machine": machine(), "rounds": rounds, "cases": found})


if __name__ == "__main__":
    main()

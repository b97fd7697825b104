"""The harness of the data processor's suite: batches, and calls as a worker makes them, alone or on two ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.data_processor import BatchPlan, Microbatch, MicrobatchRule
from rlframework.interfaces.loss import LossInput, LossType
from rlframework.interfaces.worker_group import WorkerContext, WorkerSpec
from rlframework.plugins.discovery import load_target
from rlframework.workers.process_groups import process_store
from rlframework_conformance.harness import Harness

PADDING = 99_999
PADDED, DYNAMIC, PACKED = BatchPlan("padded", 3, 0), BatchPlan("dynamic", 1, 24), BatchPlan("packed", 1, 24)
PLANS = (PADDED, DYNAMIC, PACKED)
"""One plan per mode; no row of `ragged_batches` exceeds their limits, even when padded to a multiple of 8."""


def batch_of(
    lengths: Sequence[int],
    *,
    width: int | None = None,
    token_mask: Sequence[Sequence[int]] | None = None,
    sample_mask: Sequence[int] | None = None,
) -> BatchedDataDict[Any]:
    """Return rows with the given lengths, plus a list, a per-token and a per-row field. Masks default to ones."""
    width = max(lengths) if width is None else width
    real = [[column < length for column in range(width)] for length in lengths]
    ids = [[100 * r + c + 1 if here else PADDING for c, here in enumerate(row)] for r, row in enumerate(real)]
    wanted = [[int(here) for here in row] for row in real] if token_mask is None else token_mask
    return BatchedDataDict(
        {
            "input_ids": torch.tensor(ids, dtype=torch.int64).reshape(len(lengths), width),
            "input_lengths": torch.tensor(lengths, dtype=torch.int64),
            "token_mask": torch.tensor(wanted, dtype=torch.float32).reshape(len(lengths), width),
            "sample_mask": torch.tensor(sample_mask or [1] * len(lengths), dtype=torch.float32),
            "name": [f"row {row}" for row in range(len(lengths))],
            "advantages": torch.tensor(ids, dtype=torch.float32).reshape(len(lengths), width) / 2,
            "reward": torch.arange(len(lengths), dtype=torch.float32) / 4,
        }
    )


def ragged_batches(count: int = 24) -> Iterator[BatchedDataDict[Any]]:
    """Yield batches of up to 9 rows of 0 to 12 tokens with random masks, the same ones on every call."""
    dice = random.Random(20)
    for _ in range(count):
        lengths = [dice.randint(0, 12) for _ in range(dice.randint(1, 9))]
        width = max(lengths) + dice.randint(0, 3)
        mask = [[int(c < length and dice.random() < 0.5) for c in range(width)] for length in lengths]
        yield batch_of(lengths, width=width, token_mask=mask, sample_mask=[int(dice.random() < 0.7) for _ in lengths])


def lengths_of(data: BatchedDataDict[Any], rows: Sequence[int] | None = None) -> list[int]:
    """Return the lengths of all rows, or of `rows`."""
    lengths: list[int] = data["input_lengths"].tolist()
    return lengths if rows is None else [lengths[row] for row in rows]


def targets_of(data: BatchedDataDict[Any], row: int, positions: str) -> list[int]:
    """Return the columns of `row` that are targets: never the first token, never padding."""
    columns = range(1, lengths_of(data)[row])
    if positions == "all":
        return list(columns)
    if positions == "loss" and not data["sample_mask"].tolist()[row]:
        return []
    mask = data["token_mask"][row].tolist()
    return [column for column in columns if mask[column]]


def rows_with_targets(data: BatchedDataDict[Any], positions: str) -> list[int]:
    """Return the rows that have at least one target."""
    return [row for row in range(data.size) if targets_of(data, row, positions)]


def round_up(length: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


TOKEN_LOSS: Any = SimpleNamespace(
    loss_type=LossType.TOKEN_LEVEL, input_type=LossInput.LOGPROBS, wants_entropy=False, at_sampling_temperature=False
)
"""The attributes of a loss that a data processor may read."""


@dataclass
class ProcessorHarness(Harness):
    """Builds global batches and microbatches with the processor under test."""

    def global_batch(
        self, data: BatchedDataDict[Any], batch_idx: int = 0, batch_size: int | None = None
    ) -> dict[str, Any]:
        """Process a global batch in this process; without `batch_size` all rows are one batch."""
        found: dict[str, Any] = self.load_class()().process_global_batch(
            data, TOKEN_LOSS, None, batch_idx=batch_idx, batch_size=batch_size or data.size
        )
        return found

    def microbatches(
        self, data: BatchedDataDict[Any], plan: BatchPlan, positions: str = "all", pad_multiple: int = 1
    ) -> list[Microbatch]:
        """Return the microbatches of `data`."""
        rule = MicrobatchRule(pad_multiple=pad_multiple)
        device = torch.device(self.device)
        return list(self.load_class()().microbatches(data, plan, rule, positions=positions, device=device))

    def counts_on_ranks(self, shards: Sequence[BatchedDataDict[Any]]) -> list[tuple[float, float]]:
        """Return `global_valid_seqs` and `global_valid_toks` on each rank of a gloo group with one shard per rank."""
        from rlframework.config.sections import WorkerGroupConfig
        from rlframework.interfaces.named_sharding import NamedSharding
        from rlframework.workers.processes import ProcessWorkerGroup

        spec = WorkerSpec(f"{__name__}:CountingWorker", {"target": self._importable(), "mutant": self.mutant})
        sharding = NamedSharding(list(range(len(shards))), ["data_parallel"])
        group = ProcessWorkerGroup(spec, WorkerGroupConfig(num_workers=len(shards)), sharding=sharding, device="cpu")
        try:
            future = group.run_all_workers_sharded_data("count", data=list(shards), in_sharded_axes=["data_parallel"])
            counts: list[tuple[float, float]] = group.get_all_worker_results(future)
        finally:
            group.shutdown("close")
        return counts

    def _importable(self) -> str:
        """Return the import path of the sound class; a worker applies the mutant itself, by name."""
        if self.target is None or self.mutant is not None:
            return self.record.target
        if "<locals>" in self.target.__qualname__:
            raise ValueError(f"{self.target.__qualname__} cannot be imported in another process: name the mutant")
        return f"{self.target.__module__}:{self.target.__qualname__}"


class CountingWorker:
    """One rank that counts a global batch over a gloo group of all ranks."""

    def __init__(self, *, target: str, mutant: str | None, context: WorkerContext) -> None:
        from rlframework_conformance.mutants import find_mutant

        part = load_target(target)
        self._part = part if mutant is None else find_mutant("data_processor", mutant).break_it(part)
        dist.init_process_group(
            "gloo",
            store=process_store(context),
            rank=context.rank,
            world_size=context.world_size,
            timeout=timedelta(seconds=context.deadline),
        )

    def count(self, data: BatchedDataDict[Any]) -> tuple[float, float]:
        """Return the counts that losses divide by."""
        found = self._part().process_global_batch(data, TOKEN_LOSS, dist.group.WORLD, batch_idx=0, batch_size=data.size)
        return float(found["global_valid_seqs"]), float(found["global_valid_toks"])

    def close(self) -> None:
        """Leave the group together: gloo may abort a process whose peer left first."""
        dist.barrier()
        dist.destroy_process_group()

"""The harness of the data processor's suite: calls it as a worker does, alone or on two ranks."""

from __future__ import annotations

from collections.abc import Sequence
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

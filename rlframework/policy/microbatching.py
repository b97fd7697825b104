"""A worker's rows as microbatches: those of the data processor, plus dummies."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.batch.batch_rows import round_up
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.collectives import max_over_ranks
from rlframework.batch.packed_tensor import has_media
from rlframework.interfaces.data_processor import BatchPlan, DataProcessor, GlobalBatch, Microbatch
from rlframework.interfaces.loss import LossFunction
from rlframework.microbatches.data_processor import make_dummy, to_device
from rlframework.policy.engine import Engine


class Microbatching:
    """Groups rows into microbatches as `policy.batching` says, within the constraints of an engine."""

    def __init__(self, engine: Engine, processor: DataProcessor) -> None:
        self.engine = engine
        self.processor = processor

    def mode(self, data: BatchedDataDict[Any] | None = None) -> str:
        """Return how rows are grouped: "padded", "dynamic" or "packed".

        With `data`, `auto` does not choose packing for multimodal rows.
        """
        mode = self.engine.config.batching.mode
        if mode != "auto":
            return mode
        preferred = self.engine.preferred_batching()
        return "dynamic" if preferred == "packed" and data is not None and has_media(data) else preferred

    def global_batch(
        self, data: BatchedDataDict[Any], loss_fn: LossFunction, index: int, rows: int | None
    ) -> GlobalBatch:
        """Return this rank's rows of global batch `index`, and its counts: `DataProcessor.process_global_batch`."""
        group = self.engine.data_parallel_group()
        return self.processor.process_global_batch(data, loss_fn, group, batch_idx=index, batch_size=rows)

    def split(self, data: BatchedDataDict[Any], positions: str, rows: int, tokens: int | None) -> list[Microbatch]:
        """Return this rank's microbatches, plus dummies up to the count that all ranks and the engine require.

        `rows`: rows of a padded microbatch; `tokens`: maximum of a dynamic or packed one (None: the engine's default).
        """
        engine = self.engine
        rule = engine.microbatch_rule()
        longest = round_up(int(data["input_lengths"].max()), rule.pad_multiple)
        plan = BatchPlan(self.mode(data), rows, tokens or max(engine.preferred_tokens(), longest))
        microbatches = list(self.processor.microbatches(data, plan, rule, positions=positions, device=engine.device))
        most = int(max_over_ranks(torch.tensor(len(microbatches)), engine.data_parallel_group()))
        count = max(most, rule.count_minimum)
        count += -count % rule.count_multiple
        missing = count - len(microbatches)
        if not missing:
            return microbatches
        dummy = make_dummy(data, packed=plan.mode == "packed", pad_multiple=rule.pad_multiple)
        return microbatches + [to_device(dummy, engine.device)] * missing

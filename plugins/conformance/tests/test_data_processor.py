"""The default data processor and a plain one pass the suite, and the suite catches every mutant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlframework.base.errors import BatchError
from rlframework.interfaces.data_processor import DataProcessor, Microbatch, ProcessedInputs
from rlframework.plugins.manager import create_manager
from rlframework_conformance import DataProcessorSuite
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.proof import MutantProof


class TestDataProcessor(DataProcessorSuite):
    backend = "microbatches"


class PlainProcessor(DataProcessor):
    """Written from the interface alone: one microbatch per row or group, unless the driver planned them."""

    def process_global_batch(self, data, loss_fn, dp_group, *, batch_idx, batch_size):
        batch = data.get_batch(batch_idx, batch_size)
        rows, width = batch["input_ids"].shape
        for key, shape in (("sample_mask", (rows,)), ("token_mask", (rows, width))):
            if key not in batch or batch[key].shape != shape:
                raise BatchError(f"{key} must exist with shape {shape}")
        valid = batch["sample_mask"]
        counts = torch.stack([valid.sum(), (batch["token_mask"][:, 1:] * valid[:, None]).sum()])
        if dp_group is not None:
            torch.distributed.all_reduce(counts, group=dp_group)
        return {"batch": batch, "global_valid_seqs": counts[0], "global_valid_toks": counts[1]}

    def microbatches(self, data, plan, rule, *, positions, device):
        if positions not in ("all", "token_mask", "loss", "last", "loss_last"):
            raise BatchError(f"positions is {positions!r}")
        units = self.units(data, plan)
        groups: Any = units
        if data.micro_batch_indices is not None:
            groups = [list(range(start, end)) for start, end in data.micro_batch_indices[0]]
        for unit in units:
            if not any(set(unit) <= set(group) for group in groups):
                raise BatchError(f"group {int(data['group_ids'][unit[0]])} is divided")
        columns = [self.columns(data, row, positions) for row in range(data.size)]
        counted = {row for unit in units if any(columns[row] for row in unit) for row in unit}
        kept = [[row for row in group if row in counted] for group in groups]
        made = [self.made(data, rows, columns, plan, rule.pad_multiple) for rows in kept if rows]
        for microbatch in made if positions.endswith("last") else ():
            microbatch.head_positions += 1
        return made

    def units(self, data: Any, plan: Any) -> list[list[int]]:
        if not plan.groups:
            return [[row] for row in range(data.size)]
        if "group_ids" not in data:
            raise BatchError(f"group_ids are missing in {sorted(data)}")
        ids = data["group_ids"].tolist()
        units = [[row for row, other in enumerate(ids) if other == group] for group in dict.fromkeys(ids)]
        for unit in units:
            if plan.mode == "padded" and len(unit) > plan.rows:
                raise BatchError(f"group {ids[unit[0]]} has {len(unit)} rows, more than {plan.rows}")
        return units

    def columns(self, data: Any, row: int, positions: str) -> list[int]:
        if positions.startswith("loss") and not data["sample_mask"][row]:
            return []
        every = range(1, int(data["input_lengths"][row]))
        if positions.endswith("last"):
            return [every.stop - 1] * (every.stop > 0)
        return [column for column in every if positions == "all" or data["token_mask"][row, column]]

    def made(self, data: Any, rows: list[int], columns: Any, plan: Any, multiple: int) -> Microbatch:
        part = data.select_indices(rows)
        lengths = part["input_lengths"].tolist()
        width = max(lengths)
        part.truncate_tensors(1, width)
        packed = plan.mode == "packed"
        sequences = [data["input_ids"][row, :length] for row, length in zip(rows, lengths, strict=True)]
        lines = [torch.cat(sequences)] if packed else sequences
        length = max(map(len, lines))
        length += -length % multiple
        if plan.mode != "padded" and length * len(lines) > plan.tokens:
            group = f"group {int(data['group_ids'][rows[0]])}: " if plan.groups else ""
            raise BatchError(f"{group}{len(rows)} rows of {length} tokens are more than {plan.tokens}")
        ids = torch.zeros(len(lines), length, dtype=torch.int64)
        places = torch.zeros(len(lines), length, dtype=torch.int64)
        for line, tokens in enumerate(lines):
            ids[line, : len(tokens)] = tokens
        starts = [sum(lengths[:place]) if packed else place * length for place in range(len(rows))]
        for start, count in zip(starts, lengths, strict=True):
            places.view(-1)[start : start + count] = torch.arange(count)
        wanted = [(place, column) for place, row in enumerate(rows) for column in columns[row]]
        return Microbatch(
            data_dict=part,
            processed_inputs=ProcessedInputs(input_ids=ids, seq_len=length, position_ids=places),
            original_batch_size=len(rows),
            original_seq_len=width,
            rows=torch.tensor(rows),
            head_positions=torch.tensor([starts[place] + column - 1 for place, column in wanted]),
            targets=torch.tensor([int(part["input_ids"][place, column]) for place, column in wanted]),
            scatter=torch.tensor([place * width + column for place, column in wanted]),
            cu_seqlens=torch.tensor([*starts, sum(lengths)], dtype=torch.int32) if packed else None,
        )


@pytest.mark.parametrize("test", sorted(set(DataProcessorSuite.tests()) - {"test_counts_are_summed_over_ranks"}))
def test_a_plain_processor_passes(test: str, tmp_path: Path) -> None:
    """The suite requires what the interface specifies. (Workers cannot import this module.)"""
    manager = create_manager()
    record = manager.select("data_processor", "microbatches").record
    where = {"manager": manager, "device": "cpu", "folder": tmp_path, "models": tmp_path}
    getattr(DataProcessorSuite(), test)(
        DataProcessorSuite.open_harness(record, Layout(), **where, target=PlainProcessor)
    )


class TestMutants(MutantProof):
    kind = "data_processor"
    backend = "microbatches"

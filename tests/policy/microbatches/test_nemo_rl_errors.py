"""NeMo-RL's functions for microbatches and global batches reject invalid rows and settings."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_rows import DYNAMIC, FIXED, PACKED, TOKENIZER, changed

from rlframework.base.errors import BatchError
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.nemo_rl.microbatches import (
    get_microbatch_iterator,
    make_processed_microbatch_iterator,
    process_global_batch,
    process_microbatch,
)


def one(data: Any, packing: bool = True, cfg: Any = PACKED, cp_size: int = 1) -> Any:
    return process_microbatch(data, TOKENIZER, packing, cfg, cp_size)


def many(data: Any, cfg: Any, mbs: int = 1, mesh: Any = None, cp_size: int = 1) -> Any:
    return get_microbatch_iterator(data, cfg, mbs, mesh, TOKENIZER, cp_size)


def counted(data: Any, batch_idx: int = 0, batch_size: Any = 2) -> Any:
    return process_global_batch(data, None, None, batch_idx=batch_idx, batch_size=batch_size)


WRONG: dict[str, tuple[Any, str]] = {
    "no ids": (lambda: one(changed(input_ids=None)), "input_ids must be present"),
    "ids of floats": (lambda: one(changed(input_ids=torch.ones(2, 3))), r"token ids \[B, S\], got torch.float32"),
    "ids of 1-D": (lambda: one(changed(input_ids=torch.ones(2).long())), r"\[B, S\], got torch.int64 of shape \[2\]"),
    "ids as a list": (lambda: one(changed(input_ids=[[1], [2]])), r"\[B, S\], got a list"),
    "no lengths": (lambda: one(changed(input_lengths=None)), "input_lengths must be present"),
    "lengths as a list": (lambda: one(changed(input_lengths=[2, 3])), "tensor of 2 lengths, got a list"),
    "one length": (lambda: one(changed(input_lengths=torch.tensor([2]))), "tensor of 2 lengths, got torch.int64"),
    "2-D lengths": (lambda: one(changed(input_lengths=torch.ones(2, 1).long())), "tensor of 2 lengths"),
    "float lengths": (lambda: one(changed(input_lengths=torch.ones(2))), "integers, got torch.float32"),
    "lengths over the width": (
        lambda: one(changed(input_lengths=torch.tensor([4, 1]))),
        r"of row 0 is 4; allowed is 0\.\.3",
    ),
    "lengths under 0": (
        lambda: one(changed(input_lengths=torch.tensor([-4, 1]))),
        r"of row 0 is -4; allowed is 0\.\.3",
    ),
    "cp_size": (lambda: one(changed(), cp_size=0), "cp_size must be at least 1, got 0"),
    "section": (lambda: one(changed(), cfg={"dtensor_cfg": True}), r"cfg\['dtensor_cfg'\] must be a section"),
    "no dynamic section": (lambda: many(changed(), {}), "must have a section dynamic_batching"),
    "no enabled": (lambda: many(changed(), {"dynamic_batching": {}}), "with the key enabled, got {}"),
    "both": (lambda: many(changed(), {**PACKED, **DYNAMIC}), "both dynamic_batching and sequence_packing"),
    "rows do not divide": (lambda: many(changed(), FIXED, 3), "2 rows do not divide into microbatches of 3"),
    "mbs 0": (lambda: many(changed(), FIXED, 0), "mbs must be at least 1, got 0"),
    "mbs None": (lambda: many(changed(), FIXED, None), "mbs must be an integer, got None"),
    "mbs text": (lambda: many(changed(), FIXED, "2"), "mbs must be an integer, got '2'"),
    "cfg None": (lambda: many(changed(), None), "cfg must be a dictionary .*, got a NoneType"),
    "cfg None in one": (lambda: one(changed(), cfg=None), "cfg must be a dictionary .*, got a NoneType"),
    "cfg a list": (lambda: next(make_processed_microbatch_iterator(iter([changed()]), TOKENIZER, [], 1)), "got a list"),
    "cp_size text": (lambda: one(changed(), cp_size="2"), "cp_size must be an integer, got '2'"),
    "cp_size None in many": (lambda: many(changed(), FIXED, cp_size=None), "cp_size must be an integer, got None"),
    "bool ids": (lambda: one(changed(input_ids=torch.ones(2, 3).bool())), r"token ids \[B, S\].* got torch.bool"),
    "bool lengths": (lambda: one(changed(input_lengths=torch.ones(2).bool()), False), "must be integers"),
    "not planned": (lambda: many(changed(), PACKED), "no microbatch metadata"),
    "not planned, dynamic": (lambda: many(changed(), DYNAMIC), "no microbatch metadata"),
    "mesh": (lambda: many(changed(), FIXED, 1, mesh="dp"), "dp_mesh is a str"),
    "no ids in many": (lambda: many(changed(input_ids=None), FIXED), "input_ids must be present"),
    "cp_size in many": (lambda: many(changed(), FIXED, cp_size=-1), "cp_size must be at least 1, got -1"),
    "no sample mask": (lambda: counted(changed(sample_mask=None)), "sample_mask must be present in the data!"),
    "sample mask 2-D": (lambda: counted(changed(sample_mask=torch.ones(2, 3))), r"sample_mask must be a tensor \[B\]"),
    "sample mask as a list": (lambda: counted(changed(sample_mask=[1, 1])), "got a list"),
    "token mask 1-D": (lambda: counted(changed(token_mask=torch.ones(2))), r"token_mask must be a tensor \[B, S\]"),
    "token mask of other rows": (lambda: counted(changed(token_mask=torch.ones(3, 3))), "same number of rows"),
    "no such batch": (lambda: counted(changed(), 1), r"slice\(2, 4\)|get_batch\(1"),
    "no size": (lambda: counted(changed(), 0, None), r"get_batch\(0, None\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_raised_at_once(case):
    call, message = WRONG[case]
    with pytest.raises(BatchError, match=message):
        call()


VALUES = st.sampled_from(
    [None, 3, "word", [1, 2], [[1], [2]], torch.ones(()), torch.ones(2), torch.ones(2, 3), torch.ones(2).long(),
     torch.ones(2, 3).long(), torch.ones(2, 3).bool(), torch.zeros(2).long(), torch.full((2,), 9), torch.ones(3).long(),
     torch.ones(0, 3).long(), torch.ones(2, 0).long(), torch.ones(2, 3, 4), PackedTensor([None, torch.ones(1)], 0)]
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    ids=VALUES,
    lengths=VALUES,
    tokens=VALUES,
    samples=VALUES,
    cfg=st.sampled_from([{}, FIXED, DYNAMIC, PACKED, {"dynamic_batching": None}, {**FIXED, "sequence_packing": 3}]),
    cp_size=st.sampled_from([1, 2]),
)
def test_any_input_works_or_raises_batch_error(ids, lengths, tokens, samples, cfg, cp_size):
    data = changed(input_ids=ids, input_lengths=lengths, token_mask=tokens, sample_mask=samples)
    data.micro_batch_indices, data.micro_batch_lengths = [[[0, 1], [1, 2]]], [[3, 3]]
    for call in (
        lambda: one(data, False, cfg, cp_size),
        lambda: one(data, True, cfg, cp_size),
        lambda: list(many(data, cfg, cp_size=cp_size)[0]),
        lambda: counted(data),
    ):
        with suppress(BatchError):  # any other error fails the test
            call()

"""NeMo-RL's functions for microbatches: by hand, against sums and loops, and on two gloo processes."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.data.packed_tensor import PackedTensor
from rlframework.data.processing import (
    get_microbatch_iterator,
    make_processed_microbatch_iterator,
    process_global_batch,
    process_microbatch,
)
from rlframework.distributed.batched_data_dict import BatchedDataDict
from rlframework.errors import BatchError
from rlframework.interfaces.loss import LossType

pytestmark = pytest.mark.xdist_group("processing")  # one start of the two ranks serves all

EOS = 9
TOKENIZER = SimpleNamespace(eos_token_id=EOS, pad_token_id=None)
OFF = {"enabled": False}
FIXED: dict[str, Any] = {"dynamic_batching": OFF}
DYNAMIC: dict[str, Any] = {"dynamic_batching": {"enabled": True}}
PACKED: dict[str, Any] = {"dynamic_batching": OFF, "sequence_packing": {"enabled": True, "train_mb_tokens": 500}}


def rows_of(lengths: list[int], width: int | None = None, **more: Any) -> BatchedDataDict[Any]:
    """Row r holds the tokens 10 r + 1, 10 r + 2, ..., and its number; padding is 0."""
    columns = torch.arange(width or max(lengths, default=0))
    real = columns < torch.tensor(lengths, dtype=torch.int64)[:, None]
    ids = (torch.arange(len(lengths))[:, None] * 10 + columns + 1) * real
    rows = {"input_ids": ids, "input_lengths": torch.tensor(lengths, dtype=torch.int64)}
    return BatchedDataDict({**rows, "number": torch.arange(len(lengths)), **more})


# -- one microbatch ---------------------------------------------------------------------------------------------------


def test_padded_by_hand():
    rows = rows_of([2, 3], 4)
    inputs = process_microbatch(rows, TOKENIZER, False, FIXED, cp_size=1)
    assert inputs.input_ids is rows["input_ids"]
    assert inputs.seq_len == 4
    assert inputs.attention_mask.tolist() == [[True] * 4] * 2
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert [inputs.has_flash_attention, inputs.has_context_parallel, inputs.is_multimodal] == [False] * 3
    assert (inputs.flash_attn_kwargs, inputs.cp_buffers, inputs.seq_index) == ({}, [], None)


def test_packed_by_hand():
    inputs = process_microbatch(rows_of([2, 3], 4), TOKENIZER, True, PACKED, cp_size=1)
    assert inputs.input_ids.tolist() == [[1, 2, 11, 12, 13]]  # not filled up to 500
    assert inputs.position_ids.tolist() == [[0, 1, 0, 1, 2]]
    assert inputs.seq_len == 5
    assert inputs.attention_mask is None
    assert inputs.has_flash_attention
    bounds = inputs.flash_attn_kwargs
    assert bounds.cu_seqlens_q.tolist() == bounds.cu_seqlens_k.tolist() == [0, 2, 5]
    assert (bounds.max_seqlen_q, bounds.max_seqlen_k) == (3, 3)


@pytest.mark.parametrize("packing", [False, True])
def test_context_parallelism_by_hand(packing):
    rows = rows_of([2, 3])
    before = rows["input_ids"].clone()
    inputs = process_microbatch(rows, TOKENIZER, packing, PACKED if packing else FIXED, cp_size=2)
    expected = [[1, 2, 11, 12, 13, EOS, EOS, EOS]] if packing else [[1, 2, 0, EOS], [11, 12, 13, EOS]]
    positions = [[0, 1, 0, 1, 2, 0, 0, 0]] if packing else [[0, 1, 2, 3]] * 2
    assert inputs.input_ids.tolist() == expected  # a multiple of 2 * 2 columns
    assert inputs.position_ids.tolist() == positions
    assert inputs.seq_len == len(expected[0])
    assert inputs.seq_index.tolist() == [list(range(inputs.seq_len))]
    assert inputs.has_context_parallel
    assert inputs.attention_mask is None
    for buffer, tensor in zip(
        inputs.cp_buffers, (inputs.input_ids, inputs.position_ids, inputs.seq_index), strict=True
    ):
        assert buffer is tensor
        buffer.fill_(-5)  # as torch splits them in place
    assert torch.equal(rows["input_ids"], before)


def test_context_parallelism_does_not_split_the_batch_itself():
    rows = rows_of([4, 4])
    inputs = process_microbatch(rows, TOKENIZER, False, FIXED, cp_size=2)
    inputs.cp_buffers[0].fill_(-5)
    assert rows["input_ids"].tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]


@pytest.mark.parametrize(("eos", "pad", "filling"), [(3, 4, 3), (None, 4, 4), (None, None, 0), (0, 4, 0)])
def test_what_fills_up(eos, pad, filling):
    tokenizer = SimpleNamespace(eos_token_id=eos, pad_token_id=pad)
    inputs = process_microbatch(rows_of([3]), tokenizer, False, FIXED, cp_size=2)
    assert inputs.input_ids.tolist() == [[1, 2, 3, filling]]


def test_media_go_to_the_model_which_makes_positions():
    pixels = [torch.ones(2, 3), None]
    types = torch.tensor([[0, 1, 1], [0, 0, 0]])
    rows = rows_of([3, 2], pixel_values=PackedTensor(pixels, dim_to_pack=0), mm_token_type_ids=types)
    inputs = process_microbatch(rows, TOKENIZER, False, FIXED, cp_size=1)
    assert inputs.is_multimodal
    assert sorted(inputs.vlm_kwargs) == ["mm_token_type_ids", "pixel_values"]
    assert torch.equal(inputs.vlm_kwargs["pixel_values"], torch.ones(2, 3))
    assert inputs.position_ids is None
    text = process_microbatch(rows.slice(1, 2), TOKENIZER, False, FIXED, cp_size=1)
    assert sorted(text.vlm_kwargs) == ["mm_token_type_ids"]  # this row has no image


@pytest.mark.parametrize(
    ("packing", "cfg", "cp_size", "message"),
    [
        (True, PACKED, 1, "sequence packing"),
        (False, FIXED, 2, "context parallelism"),
        (False, {**FIXED, "dtensor_cfg": {"sequence_parallel": True}}, 1, "sequence parallelism"),
        (True, PACKED, 2, "sequence packing and context parallelism"),
    ],
)
def test_media_are_refused_where_they_would_go_wrong(packing, cfg, cp_size, message):
    rows = rows_of([3, 2], pixel_values=PackedTensor([torch.ones(2, 3), None], dim_to_pack=0))
    told = rf"multimodal rows \(pixel_values\) are not supported for {message}: switch that off"
    with pytest.raises(BatchError, match=told):
        process_microbatch(rows, TOKENIZER, packing, cfg, cp_size)
    text = rows_of([3, 2])
    process_microbatch(text, TOKENIZER, packing, cfg, cp_size)


# -- iterators --------------------------------------------------------------------------------------------------------


def test_the_iterator_is_lazy_and_keeps_the_rows():
    made = []

    def raw():
        for lengths in ([2, 3], [4]):
            made.append(rows_of(lengths))
            yield made[-1]

    iterator = make_processed_microbatch_iterator(raw(), TOKENIZER, {}, cp_size=1)
    assert made == []
    first = next(iterator)
    assert len(made) == 1
    assert first.data_dict is made[0]
    assert (first.original_batch_size, first.original_seq_len) == (2, 3)
    packed = list(make_processed_microbatch_iterator(raw(), TOKENIZER, PACKED, cp_size=1))
    assert [part.processed_inputs.seq_len for part in packed] == [5, 4]
    assert [part.original_batch_size for part in packed] == [2, 1]


def numbers(iterator: Any) -> list[list[int]]:
    return [part.data_dict["number"].tolist() for part in iterator]


def shard(data: BatchedDataDict[Any], mode: str, shards: int, tokens: int) -> list[BatchedDataDict[Any]]:
    common = {"max_tokens_per_microbatch": tokens, "input_key": "input_ids", "input_lengths_key": "input_lengths"}
    if mode == "dynamic":
        return data.shard_by_batch_size(shards, dynamic_batching_args={**common, "sequence_length_round": 1})[0]
    packing = {**common, "algorithm": "modified_first_fit_decreasing", "sequence_length_pad_multiple": 1}
    return data.shard_by_batch_size(shards, sequence_packing_args=packing)[0]


def test_fixed_microbatches():
    iterator, count = get_microbatch_iterator(rows_of([1, 2, 3, 4]), FIXED, 2, None, TOKENIZER)
    assert count == 2
    assert numbers(iterator) == [[0, 1], [2, 3]]


def test_dynamic_microbatches_are_as_wide_as_their_longest_row():
    (only,) = shard(rows_of([3, 9, 5, 16]), "dynamic", 1, 16)
    iterator, count = get_microbatch_iterator(only, DYNAMIC, 99, None, TOKENIZER)
    found = list(iterator)
    assert count == len(found) == 3  # 3 and 5; 9; 16
    assert [part.processed_inputs.seq_len for part in found] == [5, 9, 16]
    assert numbers(found) == [[0, 2], [1], [3]]


def test_packed_microbatches_are_the_planned_bins():
    (only,) = shard(rows_of([3, 9, 5, 16]), "packed", 1, 17)
    iterator, count = get_microbatch_iterator(only, PACKED, 99, None, TOKENIZER)
    found = list(iterator)
    assert count == len(found) == 2
    assert sorted(map(sorted, numbers(found))) == [[0, 1, 2], [3]]
    assert sorted(part.processed_inputs.seq_len for part in found) == [16, 17]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=4, max_size=16).filter(lambda rows: len(rows) % 2 == 0),
    mode=st.sampled_from(["dynamic", "packed"]),
    tokens=st.integers(12, 40),
)
def test_every_row_is_in_one_microbatch_and_every_token_reaches_the_model(lengths, mode, tokens):
    shards = 2 if mode == "dynamic" else 1
    seen: list[int] = []
    for part in shard(rows_of(lengths, 14), mode, shards, tokens):
        iterator, count = get_microbatch_iterator(part, DYNAMIC if mode == "dynamic" else PACKED, 1, None, TOKENIZER)
        found = list(iterator)
        assert len(found) == count
        for one in found:
            rows, inputs = one.data_dict, one.processed_inputs
            seen += rows["number"].tolist()
            each = zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True)
            if mode == "packed":
                assert inputs.input_ids[0].tolist() == [token for row, n in each for token in row[:n].tolist()]
                assert inputs.seq_len <= tokens
            else:
                assert inputs.input_ids.numel() <= tokens
                assert all(row[:n].all() for row, n in each)
    assert sorted(seen) == list(range(len(lengths)))


# -- global batches ---------------------------------------------------------------------------------------------------


def test_counts_by_hand():
    token_mask = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 0], [1, 1, 1]])
    rows = rows_of([3, 3, 2, 3], token_mask=token_mask, sample_mask=torch.tensor([1.0, 1.0, 1.0, 0.0]))
    found = process_global_batch(rows, None, None, batch_idx=0, batch_size=2)
    assert found["batch"]["number"].tolist() == [0, 1]
    assert (found["global_valid_seqs"].item(), found["global_valid_toks"].item()) == (2, 3)
    found = process_global_batch(rows, None, None, batch_idx=1, batch_size=2)
    assert found["batch"]["number"].tolist() == [2, 3]
    assert (found["global_valid_seqs"].item(), found["global_valid_toks"].item()) == (1, 1)
    for name in ("global_valid_seqs", "global_valid_toks"):
        assert found[name].shape == ()
        assert found[name].dtype == torch.float32


def test_without_a_token_mask_every_target_counts():
    rows = rows_of([4, 1, 3], 6, sample_mask=torch.tensor([1.0, 1.0, 0.0]))
    rows["input_lengths"][1] = 0
    assert process_global_batch(rows, None, None, batch_idx=0, batch_size=3)["global_valid_toks"] == 3
    del rows["input_lengths"]
    assert process_global_batch(rows, None, None, batch_idx=0, batch_size=3)["global_valid_toks"] == 10


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 6),
    width=st.integers(0, 7),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.bool, torch.int64, torch.float32, torch.float64, torch.uint8]),
    sample_dtype=st.sampled_from([torch.bool, torch.int32, torch.float32, torch.bfloat16]),
)
def test_counts_are_plain_sums(rows, width, seed, dtype, sample_dtype):
    generator = torch.Generator().manual_seed(seed)
    token_mask = (torch.rand(rows, width, generator=generator) > 0.5).to(dtype)
    sample_mask = (torch.rand(rows, generator=generator) > 0.3).to(sample_dtype)
    data = BatchedDataDict(
        {"input_ids": torch.zeros(rows, width).long(), "token_mask": token_mask, "sample_mask": sample_mask}
    )
    found = process_global_batch(data, None, None, batch_idx=0, batch_size=rows)
    chosen = [row for row in range(rows) if sample_mask[row]]
    assert found["global_valid_seqs"].item() == len(chosen)
    expected = sum(bool(token_mask[row, column]) for row in chosen for column in range(1, width))
    assert found["global_valid_toks"].item() == expected


class NemoLossType(Enum):
    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


@pytest.mark.parametrize("token_level", [LossType.TOKEN_LEVEL, NemoLossType.TOKEN_LEVEL])
def test_a_token_level_loss_needs_the_token_mask(token_level):
    rows = rows_of([2, 3], sample_mask=torch.ones(2))
    with pytest.raises(AssertionError, match="token_mask must be present in the data when using token-level loss"):
        process_global_batch(rows, SimpleNamespace(loss_type=token_level), None, batch_idx=0, batch_size=2)
    for loss in (SimpleNamespace(loss_type=NemoLossType.SEQUENCE_LEVEL), SimpleNamespace(), len):
        assert process_global_batch(rows, loss, None, batch_idx=0, batch_size=2)["global_valid_toks"] == 3


# -- two processes ----------------------------------------------------------------------------------------------------

RANKS = """
import datetime, json, os, sys
from types import SimpleNamespace
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from rlframework.data.processing import get_microbatch_iterator, process_global_batch, process_microbatch
from rlframework.distributed.batched_data_dict import BatchedDataDict

folder = sys.argv[1]
rank = 0 if os.fork() else 1
dist.init_process_group(
    "gloo", init_method="file://" + folder + "/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30)
)
found = {}

def told(name, call):
    try:
        found[name] = call()
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"

def batch(rows):
    return BatchedDataDict(
        input_ids=torch.arange(rows * 4).reshape(rows, 4) + 1, input_lengths=torch.full((rows,), 4),
        token_mask=torch.ones(rows, 4), sample_mask=torch.ones(rows), number=torch.arange(rows),
        words=["word"] * rows, lists=torch.zeros(rows, 4, 3),
    )

def counts(data, size, group):
    made = process_global_batch(data, None, group, batch_idx=0, batch_size=size)
    return [made["global_valid_seqs"].item(), made["global_valid_toks"].item(), made["batch"].size]

def planned(ranges, rows):
    data = batch(rows)
    data.micro_batch_indices, data.elem_counts_per_gb = [ranges], [rows]
    data.micro_batch_lengths = [[4 * (end - start) for start, end in ranges]]
    return data

def numbers(data, cfg, mesh):
    iterator, count = get_microbatch_iterator(data, cfg, 1, mesh, tokenizer)
    return count, [part.data_dict["number"].tolist() for part in iterator]

tokenizer = SimpleNamespace(eos_token_id=7)
off = {"enabled": False}
packed = {"dynamic_batching": off, "sequence_packing": {"enabled": True}}
world = dist.group.WORLD
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
alone = [dist.new_group([each]) for each in (0, 1)][rank]

told("counts", lambda: counts(batch(2 + rank), 2 + rank, world))
told("none here", lambda: counts(planned([], 0) if rank else batch(2), None if rank else 2, world))
told("not summed", lambda: counts(batch(2 + rank), 2 + rank, None))
ranges = [[[0, 1], [1, 3]], [[0, 1], [1, 2], [2, 4], [4, 5], [5, 6]]][rank]
rows = [3, 6][rank]
told("packed", lambda: numbers(planned(ranges, rows), packed, mesh))
told("group", lambda: numbers(planned(ranges, rows), packed, world))
told("default", lambda: numbers(planned(ranges, rows), packed, None))
told("one rank groups", lambda: numbers(planned(ranges, rows), packed, alone))
told("fixed", lambda: numbers(batch(1 + 2 * rank), {"dynamic_batching": off}, mesh))
def no_rows(cfg):
    data = planned([], 0) if rank else planned([[0, 2], [2, 3]], 3)
    iterator, count = get_microbatch_iterator(data, cfg, 1, mesh, tokenizer)
    parts = list(iterator)
    shapes = {key: [list(p.data_dict[key].shape) for p in parts] for key in ("input_ids", "number", "lists")}
    masks = [p.data_dict[key].sum().item() for p in parts for key in ("token_mask", "sample_mask")]
    lengths = [p.data_dict["input_lengths"].tolist() for p in parts]
    return count, [p.processed_inputs.seq_len for p in parts], shapes, sum(masks), lengths
told("no rows packed", lambda: no_rows(packed))
told("no rows fixed", lambda: numbers(batch(0 if rank else 2), {"dynamic_batching": off}, mesh))
two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
told("two dimensions", lambda: numbers(batch(1), {"dynamic_batching": off}, two))
def split():
    from torch.distributed.tensor.experimental import context_parallel
    data = batch(2)
    inputs = process_microbatch(data, tokenizer, False, {}, cp_size=2)
    with context_parallel(mesh, buffers=inputs.cp_buffers, buffer_seq_dims=[1, 1, 1]):
        inside = [inputs.input_ids.tolist(), inputs.position_ids.tolist(), inputs.seq_index.tolist()]
    return inside, data["input_ids"].tolist()
told("split", split)
open(folder + f"/{rank}.json", "w").write(json.dumps(found))
dist.destroy_process_group()
if rank == 0:
    sys.exit(os.wait()[1])
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "ignore", "-c", RANKS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


EXPECTED = {
    "counts": ([5, 15, 2], [5, 15, 3]),
    "none here": ([2, 6, 2], [2, 6, 0]),
    "not summed": ([2, 6, 2], [3, 9, 3]),
    "packed": ([2, [[0], [1, 2], [0], [1, 2], [0]]], [5, [[0], [1], [2, 3], [4], [5]]]),
    "one rank groups": ([2, [[0], [1, 2]]], [5, [[0], [1], [2, 3], [4], [5]]]),
    "fixed": ([1, [[0], [0], [0]]], [3, [[0], [1], [2]]]),
    "no rows fixed": ([2, [[0], [1]]], [0, [[0], [0]]]),
    # torch gives rank 0 the first and last quarter, rank 1 the two between
    "split": (
        [[[[1, 4], [5, 8]], [[0, 3], [0, 3]], [[0, 3]]], [[1, 2, 3, 4], [5, 6, 7, 8]]],
        [[[[2, 3], [6, 7]], [[1, 2], [1, 2]], [[1, 2]]], [[1, 2, 3, 4], [5, 6, 7, 8]]],
    ),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_two_ranks_by_hand(ranks, case):
    assert [rank[case] for rank in ranks] == list(EXPECTED[case])


def test_a_process_group_and_the_default_do_as_a_mesh(ranks):
    assert (
        [rank["group"] for rank in ranks] == [rank["default"] for rank in ranks] == [rank["packed"] for rank in ranks]
    )


def test_a_rank_without_rows_runs_dummies_that_count_for_nothing(ranks):
    count, widths, shapes, masks, lengths = ranks[1]["no rows packed"]
    assert (count, widths, masks, lengths) == (0, [1, 1], 0, [[1], [1]])
    assert shapes == {"input_ids": [[1, 1]] * 2, "number": [[1]] * 2, "lists": [[1, 1, 3]] * 2}
    assert ranks[0]["no rows packed"][:2] == [2, [8, 4]]


def test_a_mesh_of_two_dimensions_is_told(ranks):
    for rank in ranks:
        assert rank["two dimensions"].startswith("BatchError: dp_mesh has the dimensions ('dp', 'tp'); give the")


# -- wrong input ------------------------------------------------------------------------------------------------------

MASKED = {"sample_mask": torch.ones(2), "token_mask": torch.ones(2, 3)}


def changed(**values: Any) -> BatchedDataDict[Any]:
    """Two good rows with other values; None takes a key away."""
    data = rows_of([2, 3], **MASKED)
    data.update(values)
    return BatchedDataDict({key: value for key, value in data.items() if value is not None})


def one(data: Any, packing: bool = True, cfg: Any = PACKED, cp_size: int = 1) -> Any:
    return process_microbatch(data, TOKENIZER, packing, cfg, cp_size)


def many(data: Any, cfg: Any, mbs: int = 1, mesh: Any = None, cp_size: int = 1) -> Any:
    return get_microbatch_iterator(data, cfg, mbs, mesh, TOKENIZER, cp_size)


def counted(data: Any, batch_idx: int = 0, batch_size: Any = 2) -> Any:
    return process_global_batch(data, None, None, batch_idx=batch_idx, batch_size=batch_size)


WRONG: dict[str, tuple[Any, str]] = {
    "no ids": (lambda: one(changed(input_ids=None)), "input_ids must be present"),
    "ids of floats": (lambda: one(changed(input_ids=torch.ones(2, 3))), r"token ids \[B, S\], got torch.float32"),
    "ids of 1-D": (lambda: one(changed(input_ids=torch.ones(2).long())), r"\[B, S\], got torch.int64 of shape \(2,\)"),
    "ids as a list": (lambda: one(changed(input_ids=[[1], [2]])), r"\[B, S\], got a list"),
    "no lengths": (lambda: one(changed(input_lengths=None)), "input_lengths must be present"),
    "lengths as a list": (lambda: one(changed(input_lengths=[2, 3])), "tensor of 2 lengths, got a list"),
    "one length": (lambda: one(changed(input_lengths=torch.tensor([2]))), "tensor of 2 lengths, got torch.int64"),
    "2-D lengths": (lambda: one(changed(input_lengths=torch.ones(2, 1).long())), "tensor of 2 lengths"),
    "float lengths": (lambda: one(changed(input_lengths=torch.ones(2))), "tensor of integers, got torch.float32"),
    "lengths over the width": (lambda: one(changed(input_lengths=torch.tensor([4, 1]))), r"1\.\.4; allowed is 0\.\.3"),
    "lengths under 0": (lambda: one(changed(input_lengths=torch.tensor([-4, 1]))), r"-4\.\.1; allowed is 0\.\.3"),
    "cp_size": (lambda: one(changed(), cp_size=0), "cp_size is 0"),
    "section": (lambda: one(changed(), cfg={"dtensor_cfg": True}), r"cfg\['dtensor_cfg'\] must be a section"),
    "no dynamic section": (lambda: many(changed(), {}), "must have a section dynamic_batching"),
    "no enabled": (lambda: many(changed(), {"dynamic_batching": {}}), "with the key enabled, got {}"),
    "both": (lambda: many(changed(), {**PACKED, **DYNAMIC}), "both dynamic_batching and sequence_packing"),
    "rows do not divide": (lambda: many(changed(), FIXED, 3), "2 rows do not divide into microbatches of 3"),
    "mbs 0": (lambda: many(changed(), FIXED, 0), "microbatches of 0"),
    "not planned": (lambda: many(changed(), PACKED), "no metadata of microbatches"),
    "not planned, dynamic": (lambda: many(changed(), DYNAMIC), "no metadata of microbatches"),
    "mesh": (lambda: many(changed(), FIXED, 1, mesh="dp"), "dp_mesh is a str"),
    "no ids in many": (lambda: many(changed(input_ids=None), FIXED), "input_ids must be present"),
    "cp_size in many": (lambda: many(changed(), FIXED, cp_size=-1), "cp_size is -1"),
    "no sample mask": (lambda: counted(changed(sample_mask=None)), "sample_mask must be present in the data!"),
    "sample mask 2-D": (lambda: counted(changed(sample_mask=torch.ones(2, 3))), r"sample_mask must be a tensor \[B\]"),
    "sample mask as a list": (lambda: counted(changed(sample_mask=[1, 1])), "got a list"),
    "token mask 1-D": (lambda: counted(changed(token_mask=torch.ones(2))), r"token_mask must be a tensor \[B, S\]"),
    "token mask of other rows": (lambda: counted(changed(token_mask=torch.ones(3, 3))), "same number of rows"),
    "no such batch": (lambda: counted(changed(), 1), r"slice\(2, 4\)|get_batch\(1"),
    "no size": (lambda: counted(changed(), 0, None), r"get_batch\(0, None\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told_at_once(case):
    call, message = WRONG[case]
    with pytest.raises(BatchError, match=message):
        call()


VALUES = st.sampled_from(
    [None, 3, "word", [1, 2], [[1], [2]], torch.ones(()), torch.ones(2), torch.ones(2, 3), torch.ones(2).long(),
     torch.ones(2, 3).long(), torch.ones(2, 3).bool(), torch.zeros(2).long(), torch.full((2,), 9), torch.ones(3).long(),
     torch.ones(0, 3).long(), torch.ones(2, 0).long(), torch.ones(2, 3, 4), PackedTensor([None, torch.ones(1)], 0)]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    ids=VALUES,
    lengths=VALUES,
    tokens=VALUES,
    samples=VALUES,
    cfg=st.sampled_from([{}, FIXED, DYNAMIC, PACKED, {"dynamic_batching": None}, {**FIXED, "sequence_packing": 3}]),
    cp_size=st.sampled_from([1, 2]),
)
def test_any_input_works_or_is_told(ids, lengths, tokens, samples, cfg, cp_size):
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

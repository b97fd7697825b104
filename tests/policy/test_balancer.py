"""The driver's sharding of rows over ranks: balanced work, no row lost, order restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.base.errors import BatchError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packing import TokenCost
from rlframework.interfaces.data_processor import BatchPlan, MicrobatchRule
from rlframework.policy.balancer import BatchBalancer
from rlframework.policy.microbatches.data_processor import MicrobatchProcessor

WIDTH = 24


def make_batch(lengths: list[int], off: set[int] = frozenset(), width: int = WIDTH) -> BatchedDataDict[Any]:
    """Row r holds the token r + 1; rows in `off` have a sample mask of 0."""
    sizes = torch.tensor(lengths)
    real = torch.arange(width) < sizes[:, None]
    return BatchedDataDict(
        {
            "input_ids": (torch.arange(len(lengths))[:, None] + 1) * real,
            "input_lengths": sizes,
            "token_mask": real.float(),
            "sample_mask": torch.tensor([float(row not in off) for row in range(len(lengths))]),
            "row": torch.arange(len(lengths)),
        }
    )


def balancer(ranks: int, mode: str, tokens: int = 32, **rule: Any) -> BatchBalancer:
    return BatchBalancer(ranks, MicrobatchProcessor().batching(mode), tokens, TokenCost(), MicrobatchRule(**rule))


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    ranks=st.integers(1, 4),
    per_rank=st.integers(1, 4),
    batches=st.integers(1, 3),
    mode=st.sampled_from(["padded", "dynamic", "packed"]),
)
def test_each_row_goes_to_one_rank_within_its_global_batch(data, ranks, per_rank, batches, mode):
    size = ranks * per_rank
    lengths = data.draw(st.lists(st.integers(0, WIDTH), min_size=size * batches, max_size=size * batches).filter(any))
    off = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    shards, order = balancer(ranks, mode).shard(
        make_batch(lengths, off), batch_size=size, positions="loss", tokens=None
    )
    assert len(shards) == ranks
    for index in range(batches):
        rows = torch.cat([shard.get_batch(index, per_rank)["row"] for shard in shards])
        assert sorted(rows.tolist()) == list(range(index * size, (index + 1) * size))
    joined = BatchedDataDict.from_batches(shards)
    if order is not None:
        joined.reorder_data(order)
        assert joined["row"].tolist() == list(range(len(lengths)))
    assert all(set(shard) == set(make_batch([1])) for shard in shards)


@pytest.mark.parametrize("mode", ["dynamic", "packed"])
def test_ranks_get_the_same_number_of_microbatches_within_the_limit(mode):
    lengths = [24, 24, 20, 8, 6, 6, 5, 5, 4, 3, 3, 2]
    shards, _ = balancer(2, mode).shard(make_batch(lengths), batch_size=None, positions="all", tokens=32)
    counts = {len(shard.micro_batch_indices[0]) for shard in shards}
    assert len(counts) == 1
    for shard in shards:
        for start, end in shard.micro_batch_indices[0]:
            sizes = shard["input_lengths"][start:end].tolist()
            assert (sum(sizes) if mode == "packed" else max(sizes) * len(sizes)) <= 32


def test_two_ranks_share_two_long_and_many_short_rows():
    """In row order one rank would get 48 tokens and the other 12."""
    lengths = [24, 24, 3, 3, 3, 3]
    shards, _ = balancer(2, "packed").shard(make_batch(lengths), batch_size=None, positions="all", tokens=32)
    assert [int(shard["input_lengths"].sum()) for shard in shards] == [30, 30]


def test_rows_without_targets_count_as_empty():
    """Rows 0 to 2 and 5 are masked: the two rows with work go to different ranks, one microbatch each."""
    data = make_batch([24, 24, 24, 20, 20, 24], off={0, 1, 2, 5})
    shards, _ = balancer(2, "packed").shard(data, batch_size=None, positions="loss", tokens=24)
    assert [int((shard["input_lengths"] * shard["sample_mask"]).sum()) for shard in shards] == [20, 20]
    assert [len(shard.micro_batch_indices[0]) for shard in shards] == [1, 1]


def test_a_single_rank_and_padded_rows_keep_their_order():
    data = make_batch([5, 9, 3, 7])
    for ranks, mode, rows in ((1, "packed", [[0, 1, 2, 3]]), (2, "padded", [[0, 2], [1, 3]])):
        shards, order = balancer(ranks, mode).shard(data, batch_size=2, positions="all", tokens=None)
        assert order is None
        assert [shard["row"].tolist() for shard in shards] == rows
    (whole,), _ = balancer(1, "packed").shard(data, batch_size=2, positions="all", tokens=None)
    assert whole["input_ids"].data_ptr() == data["input_ids"].data_ptr()  # without a copy


def test_padding_to_a_multiple_stays_under_the_limit():
    """Two rows of 5 are two padded to 8 each, or one pack of 10 padded to 12."""
    data, packed = make_batch([5, 5, 5, 5]), balancer(2, "packed", 8, pad_multiple=4)
    for tokens, microbatches in ((11, 2), (12, 1)):
        shards, _ = packed.shard(data, batch_size=None, positions="all", tokens=tokens)
        assert [len(shard.micro_batch_indices[0]) for shard in shards] == [microbatches] * 2
    with pytest.raises(BatchError, match=r"8 tokens.*may have 7"):
        packed.shard(data, batch_size=None, positions="all", tokens=7)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", ["dynamic", "packed"])
def test_a_row_that_fits_no_microbatch_is_rejected(mode, ranks):
    """Also of one rank, whose worker groups the rows: its error would end the workers."""
    with pytest.raises(BatchError, match=r"9 tokens.*may have 8"):
        balancer(ranks, mode).shard(make_batch([3, 9]), batch_size=None, positions="all", tokens=8)


@pytest.mark.parametrize("columns", [2000, 4000])
def test_dynamic_microbatches_of_few_shapes_stay_within_the_limit(columns):
    """Rows of 1,900 tokens are padded to 1,920, and rows of 2,000 to 2,048, so 8,000 tokens hold 3 of them, not 4."""
    data = make_batch([1900] * 8 + [2000] * 8, width=columns)
    few = balancer(2, "dynamic", 8000, few_shapes=True)
    shards, _ = few.shard(data, batch_size=None, positions="all", tokens=None)
    plan, rule = BatchPlan("dynamic", 1, 8000), MicrobatchRule(few_shapes=True)
    for shard in shards:
        made = MicrobatchProcessor().microbatches(shard, plan, rule, positions="all", device=torch.device("cpu"))
        shapes = [tuple(one.processed_inputs.input_ids.shape) for one in made]
        assert all(rows * width <= 8000 for rows, width in shapes)
        assert {width for _, width in shapes} <= {1920, 2048}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    ranks=st.integers(1, 3),
    mode=st.sampled_from(["padded", "dynamic", "packed"]),
    few=st.booleans(),
    tokens=st.sampled_from([96, None]),
)
def test_groups_stay_whole_from_the_driver_to_the_microbatches(data, ranks, mode, few, tokens):
    """Groups of up to 4 rows of up to 24 tokens fit into 4 rows or 96 tokens; each global batch has 6 x ranks rows."""
    size, ids = 6 * ranks, []
    for _ in range(2):
        batch = []
        while len(batch) < size:
            left = size - len(batch)
            batch += [len(ids) + len(batch) + 100] * data.draw(st.integers(1, min(left, 4)))
        ids += data.draw(st.permutations(batch))
    lengths = data.draw(st.lists(st.integers(1, WIDTH), min_size=len(ids), max_size=len(ids)))
    off = data.draw(st.sets(st.integers(0, len(ids) - 1)))
    given_rows = make_batch(lengths, off)
    given_rows["group_ids"] = torch.tensor(ids)
    one = balancer(ranks, mode, 50, few_shapes=few)
    shards, _ = one.shard(given_rows, batch_size=size, positions="loss", tokens=tokens, grouped_rows=4)
    limit = tokens or (128 if few else 96)  # few shapes: a row alone is padded to 128
    plan, rule = BatchPlan(mode, 4, limit, groups=True), MicrobatchRule(few_shapes=few)
    for index in range(2):
        found, counts = [], set()
        for shard in shards:
            own = shard.get_batch(index, size)
            made = MicrobatchProcessor().microbatches(own, plan, rule, positions="loss", device=torch.device("cpu"))
            counts.add(len(own.micro_batch_indices[0]) if ranks > 1 else 0)
            for microbatch in made:
                shape = microbatch.processed_inputs.input_ids.shape
                assert len(microbatch.rows) <= 4 if mode == "padded" else shape.numel() <= plan.tokens
                rows = microbatch.data_dict["row"].tolist()
                starts = [place for place, row in enumerate(rows) if place == 0 or ids[row] != ids[rows[place - 1]]]
                found += [rows[start:end] for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]
        assert len(counts) == 1
        here = range(index * size, (index + 1) * size)
        wanted = {ids[row] for row in here if lengths[row] > 1 and row not in off}
        assert sorted(found) == sorted([row for row in here if ids[row] == group] for group in wanted)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("mode", "need", "key"),
    [
        ("padded", "need 3 rows of a microbatch, but policy.train_micro_batch_size is 2", "train_micro_batch_size"),
        ("dynamic", "need 18 tokens of a microbatch, but policy.batching.tokens is 12", "batching.tokens"),
        ("packed", "need 13 tokens of a microbatch, but policy.batching.tokens is 12", "batching.tokens"),
    ],
)
def test_a_group_that_fits_no_microbatch_is_rejected(mode, need, key, ranks):
    data = make_batch([5, 6, 4, 3])
    data["group_ids"] = torch.tensor([1, 40, 40, 40])
    with pytest.raises(BatchError, match=f"group 40 has 3 rows, which {need}: raise policy.{key}"):
        balancer(ranks, mode).shard(data, batch_size=None, positions="loss", tokens=12, grouped_rows=2)


def test_a_row_without_tokens_in_a_group_that_counts_is_rejected():
    data = make_batch([5, 0, 4, 0])
    data["group_ids"] = torch.tensor([1, 2, 3, 3])
    with pytest.raises(BatchError, match="row 3 of group 3 has no tokens"):
        balancer(2, "packed").shard(data, batch_size=None, positions="loss", tokens=12, grouped_rows=2)


def test_ids_change_nothing_if_the_loss_needs_no_groups():
    data = make_batch([24, 24, 20, 8, 6, 6, 5, 5])
    for mode in ("padded", "dynamic", "packed"):
        plain, _ = balancer(2, mode).shard(data, batch_size=4, positions="loss", tokens=None)
        grouped = BatchedDataDict({**data, "group_ids": torch.zeros(8, dtype=torch.int64)})
        shards, _ = balancer(2, mode).shard(grouped, batch_size=4, positions="loss", tokens=None)
        for one, other in zip(plain, shards, strict=True):
            assert one["row"].tolist() == other["row"].tolist()
            assert one.micro_batch_indices == other.micro_batch_indices

"""`BatchedDataDict` against a batch that is a plain list of rows; and fuzzed with arguments that are wrong."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.base.errors import BatchError
from rlframework.batch.batched_data_dict import BatchedDataDict, SlicedDataDict
from rlframework.batch.packed_tensor import PackedTensor

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float32, torch.complex64]


@st.composite
def values(draw, rows):
    """A value of any kind with `rows` rows, in which rows are distinguishable."""
    kind = draw(st.sampled_from(["tensor", "tensor", "list", "packed"]))
    if kind == "list":
        return draw(st.lists(st.sampled_from(["a", "b", 1, None, [1, 2]]), min_size=rows, max_size=rows))
    if kind == "packed":
        lengths = draw(st.lists(st.sampled_from([None, 0, 1, 3]), min_size=rows, max_size=rows))
        made = [None if length is None else torch.full((2, length), float(at)) for at, length in enumerate(lengths)]
        return PackedTensor(made, draw(st.sampled_from([1, -1])))
    shape = (rows, *draw(st.lists(st.integers(0, 3), max_size=2)))
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    if draw(st.booleans()) and len(shape) > 1:  # not contiguous
        numbers = torch.stack([numbers, -numbers], dim=-1)[..., 0]
    dtype = draw(st.sampled_from(DTYPES))
    return (numbers % 2 == 0) if dtype == torch.bool else numbers.to(dtype)


@st.composite
def batches(draw, most=6):
    rows = draw(st.integers(0, most))
    keys = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True))
    return BatchedDataDict({key: draw(values(rows)) for key in keys})


def row_list(batch):
    """The batch as a list of rows, each a dictionary of Python's own values, and how rows of each key look."""
    size = {len(value) for value in batch.values()}
    assert len(size) == 1
    return [{key: plain(value, row) for key, value in batch.items()} for row in range(size.pop())]


def plain(value, row):
    if isinstance(value, PackedTensor):
        return None if value.tensors[row] is None else value.tensors[row].tolist()
    return value[row].tolist() if isinstance(value, torch.Tensor) else value[row]


def looks(batch):
    return {
        key: (type(value), getattr(value, "dtype", None), tuple(getattr(value, "shape", ())[1:]))
        for key, value in batch.items()
    }


def check(batch, rows, like):
    assert row_list(batch) == rows
    assert looks(batch) == looks(like)
    assert batch.size == len(rows)


@pytest.mark.slow
@given(batches(), st.data())
@settings(deadline=None, max_examples=100)
def test_methods_act_on_a_batch_as_on_a_list_of_rows(batch, data):
    rows, original = row_list(batch), batch
    for step in data.draw(
        st.lists(st.sampled_from(["slice", "select", "mask", "chunk", "shard", "again"]), max_size=4)
    ):
        size = len(rows)
        if step == "slice":
            start = data.draw(st.integers(0, size))
            end = data.draw(st.integers(start, size))
            batch, rows = batch.slice(start, end), rows[start:end]
            assert type(batch) is SlicedDataDict
        elif step == "select":
            picked = data.draw(st.lists(st.integers(-size, size - 1), max_size=6)) if size else []
            batch, rows = batch.select_indices(picked), [rows[index] for index in picked]
        elif step == "mask":
            mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
            batch = batch.select_indices(torch.tensor(mask, dtype=torch.bool))
            rows = [row for row, kept in zip(rows, mask, strict=True) if kept]
        elif step == "chunk":
            chunks = data.draw(st.sampled_from([n for n in (1, 2, 3) if size % n == 0]))
            rank = data.draw(st.integers(0, chunks - 1))
            batch, rows = batch.chunk(rank, chunks), rows[rank * size // chunks : (rank + 1) * size // chunks]
        elif step == "shard":
            shards = batch.shard_by_batch_size(3, allow_uneven_shards=True)
            batch = BatchedDataDict.from_batches(shards)
        else:
            batch, rows = BatchedDataDict.from_batches([batch, batch]), rows + rows
        check(batch, rows, original)


@pytest.mark.slow
@given(batches(), st.data())
@settings(deadline=None, max_examples=60)
def test_reordering_and_repeating(batch, data):
    rows = row_list(batch)
    keys = data.draw(st.lists(st.integers(-3, 3), min_size=len(rows), max_size=len(rows)))
    repeats = data.draw(st.integers(0, 3))
    sorted_rows = [row for _, row in sorted(zip(keys, rows, strict=True), key=lambda pair: pair[0])]
    other = copy.copy(batch)
    other.reorder_data(keys)
    check(other, sorted_rows, batch)
    check(batch, rows, batch)  # a copy of the dictionary was reordered, not the tensors
    repeated = batch.repeat_interleave(repeats, share_immutable_media=True)
    check(repeated, [row for row in rows for _ in range(repeats)], batch)


@pytest.mark.slow
@given(batches(), st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_joined_slices_are_the_batch(batch, each):
    rows = row_list(batch)
    if len(rows) % each:
        with pytest.raises(BatchError):
            batch.make_microbatch_iterator(each)
        return
    parts = list(batch.make_microbatch_iterator(each))
    again = [batch.get_batch(index, each) for index in range(len(rows) // each)]
    assert [row for part in parts for row in row_list(part)] == rows
    assert [row_list(part) for part in again] == [row_list(part) for part in parts]
    for part in parts:
        assert looks(part) == looks(batch)
        for key, value in part.items():
            if isinstance(value, torch.Tensor):
                assert value.untyped_storage().data_ptr() == batch[key].untyped_storage().data_ptr()


@pytest.mark.slow
@given(batches(), st.integers(2, pickle.HIGHEST_PROTOCOL))
@settings(deadline=None, max_examples=60)
def test_pickles_and_copies_are_equal(batch, protocol):
    rows = row_list(batch)
    for back in (pickle.loads(pickle.dumps(batch, protocol=protocol)), copy.deepcopy(batch)):  # noqa: S301 - own
        check(back, rows, batch)
        for value in back.values():
            if isinstance(value, torch.Tensor) and value.numel():
                value.zero_()  # writable, and nobody else's
            elif isinstance(value, list):
                value.clear()
    check(batch, rows, batch)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=4), st.data())
@settings(deadline=None, max_examples=60)
def test_from_batches_pads_rows_on_the_right(shapes, data):
    depth, dtype = data.draw(st.sampled_from([(), (2,)])), data.draw(st.sampled_from(DTYPES[1:6]))
    pad = data.draw(st.integers(0, 9))
    made = [
        BatchedDataDict(x=torch.arange(rows * width * math.prod(depth)).reshape(rows, width, *depth).to(dtype))
        for rows, width in shapes
    ]
    joined = BatchedDataDict.from_batches(made, {"x": pad})
    widest = max((width for rows, width in shapes if rows), default=None)
    if widest is None:
        assert len(joined["x"]) == 0
        return
    padding = torch.full(depth, pad).tolist()
    expected = [row + [padding] * (widest - len(row)) for batch in made for row in batch["x"].tolist()]
    assert joined["x"].tolist() == expected
    assert joined["x"].dtype == dtype


# --- wrong arguments

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.sampled_from([10**30, -(10**20)]),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(-9, 9), st.floats(), st.text(max_size=1), st.none(), st.booleans()), max_size=4),
    st.lists(st.lists(st.integers(), max_size=2), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.sampled_from(
        [
            torch.tensor(1),
            torch.tensor([0, 1]),
            torch.tensor([[0]]),
            torch.tensor([0.5]),
            torch.tensor([True]),
            torch.tensor([1], dtype=torch.uint8),
            torch.zeros(2).to_sparse(),
            torch.zeros(2, device="meta"),
            np.array([1, 0]),
            np.array(["x"]),
            PackedTensor([None], 0),
            range(2),
            object(),
        ]
    ),
)
ARGS = {
    "max_tokens_per_microbatch": st.one_of(st.integers(-1, 20), JUNK),
    "sequence_length_round": st.one_of(st.integers(0, 4), JUNK),
    "sequence_length_pad_multiple": st.one_of(st.integers(0, 4), JUNK),
    "input_key": st.one_of(st.sampled_from(["ids", "n", "t"]), JUNK),
    "input_lengths_key": st.one_of(st.sampled_from(["n", "ids", "t"]), JUNK),
    "algorithm": st.one_of(st.sampled_from(["balanced", "round_robin", "concatenative"]), JUNK),
    "microbatch_order": st.one_of(st.sampled_from(["packer", "largest_first"]), JUNK),
    "unknown": JUNK,
}
BATCHING = st.one_of(
    JUNK,
    *(
        st.fixed_dictionaries(
            {name: ARGS[name] for name in ("max_tokens_per_microbatch", "input_key", "input_lengths_key", *more)},
            optional={name: ARGS[name] for name in ("algorithm", "microbatch_order", "unknown") if name not in more},
        )
        for more in (["sequence_length_round"], ["sequence_length_pad_multiple", "algorithm"])
    ),
)
CALLS = {
    "chunk": {"rank": JUNK, "chunks": JUNK},
    "slice": {"start": JUNK, "end": JUNK},
    "get_batch": {"batch_idx": JUNK, "batch_size": JUNK},
    "reorder_data": {"reorded_indices": JUNK},
    "select_indices": {"indices": JUNK},
    "repeat_interleave": {"num_repeats": JUNK},
    "truncate_tensors": {"dim": JUNK, "truncated_len": JUNK},
    "make_microbatch_iterator": {"microbatch_size": JUNK},
    "make_microbatch_iterator_with_dynamic_shapes": {"sequence_dim": JUNK},
    "make_microbatch_iterator_for_packable_sequences": {},
    "get_microbatch_iterator_dynamic_shapes_len": {},
    "get_microbatch_iterator_for_packable_sequences_len": {},
    "to": {"device": JUNK},
    "shard_by_batch_size": {"shards": JUNK, "batch_size": JUNK},
    "all_gather": {"group": st.none()},
    "get_multimodal_dict": {"as_tensors": st.booleans(), "device": JUNK},
}


def allowed(work):
    """Run it: what is wrong may be a `BatchError`, or a `TypeError` for what Python itself cannot take."""
    try:
        return work()
    except (BatchError, TypeError):
        return None


def small_batch():
    return BatchedDataDict(
        ids=torch.arange(8).reshape(2, 4),
        n=torch.tensor([2, 4]),
        t=["x", "y"],
        p=PackedTensor([None, torch.ones(1)], 0),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_wrong_arguments(name, data):
    batch = small_batch()
    given_ = {key: data.draw(strategy) for key, strategy in CALLS[name].items()}
    made = allowed(lambda: getattr(batch, name)(**given_))
    if name.startswith("make") and made is not None:
        list(made)  # an iterator that was given out works


@pytest.mark.slow
@given(st.one_of(st.integers(1, 3), JUNK), st.one_of(st.none(), st.integers(1, 2)), BATCHING, st.sampled_from("dp"))
@settings(deadline=None, max_examples=100)
def test_wrong_batching_arguments(shards, batch_size, args, kind):
    name = "dynamic_batching_args" if kind == "d" else "sequence_packing_args"
    allowed(lambda: small_batch().shard_by_batch_size(shards, batch_size, **{name: args}))


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_wrong_values(name, data):
    """Values of a batch are checked by each method that needs them."""
    batch = BatchedDataDict(
        data.draw(st.dictionaries(st.sampled_from(["a", "b", "token_type_ids", 3, None]), JUNK, max_size=3))
    )
    good = {
        "batch_idx": 0,
        "batch_size": 1,
        "rank": 0,
        "chunks": 1,
        "start": 0,
        "end": 1,
        "num_repeats": 2,
        "shards": 1,
    }
    good |= {"dim": 1, "truncated_len": 0, "microbatch_size": 1, "sequence_dim": 1, "device": "cpu", "indices": [0]}
    good |= {"reorded_indices": [0], "group": None, "as_tensors": True}
    made = allowed(lambda: getattr(batch, name)(**{key: good[key] for key in CALLS[name]}))
    if name.startswith("make") and made is not None:
        list(made)


@pytest.mark.slow
@given(
    st.one_of(JUNK, st.lists(st.one_of(JUNK, st.dictionaries(st.sampled_from("ab"), JUNK, max_size=2)), max_size=3)),
    st.one_of(st.none(), st.dictionaries(st.sampled_from("ab"), JUNK, max_size=2)),
    st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_wrong_batches(given_, pads, allow):
    allowed(lambda: BatchedDataDict.from_batches(given_, pads, allow_missing_packed_tensors=allow))


@pytest.mark.slow
@given(JUNK)
@settings(deadline=None, max_examples=60)
def test_wrong_pads(pad):
    parts = [{"x": torch.zeros(1, 1, dtype=torch.uint8)}, {"x": torch.zeros(1, 2, dtype=torch.uint8)}]
    allowed(lambda: BatchedDataDict.from_batches(parts, {"x": pad}))

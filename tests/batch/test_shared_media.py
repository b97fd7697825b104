"""The repeated prompts of a group have their media once: in batches and shards, for workers, and in checkpoints."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packed_tensor import PackedTensor

GROUPS, ROWS = 3, 8
IMAGE = 4 * 64 * 768
"""Bytes of the patches of an image."""


def groups(*, shared: bool = True) -> BatchedDataDict[Any]:
    """`GROUPS` prompts with a different image each, repeated `ROWS` times."""
    images = torch.arange(GROUPS).repeat_interleave(64)[:, None] + torch.linspace(0, 1, 768)
    prompts: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": torch.arange(GROUPS * 5).view(GROUPS, 5),
            "input_lengths": torch.full((GROUPS,), 5),
            "group_ids": torch.arange(GROUPS),
            "pixel_values": PackedTensor(list(images.split(64)), 0),
        }
    )
    rows = prompts.repeat_interleave(ROWS, share_immutable_media=True)
    if not shared:
        rows["pixel_values"] = PackedTensor([row.clone() for row in rows["pixel_values"].tensors], 0)
    return rows


def media_bytes(rows: BatchedDataDict[Any]) -> int:
    """The bytes of memory that the media of `rows` occupy."""
    storages = [row.untyped_storage() for row in rows["pixel_values"].tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def torch_saved(rows: Any) -> tuple[int, Any]:
    file = io.BytesIO()
    torch.save(rows, file)
    size = file.tell()
    file.seek(0)
    return size, torch.load(file, weights_only=False)


def pickled(rows: Any) -> tuple[int, Any]:
    """As worker processes get them."""
    written = pickle.dumps(rows, protocol=5)
    return len(written), pickle.loads(written)  # noqa: S301 - written here


def sent_by_ray(rows: Any) -> tuple[int, Any]:
    """As Ray's store gets them."""
    from rlframework_ray.transport import Packed

    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(Packed(rows), protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    return len(head) + sum(part.nbytes for part in raw), pickle.loads(head, buffers=raw)  # noqa: S301 - written here


@pytest.mark.parametrize("send", [pickled, torch_saved, sent_by_ray])
def test_a_group_is_sent_with_one_copy_of_its_media(send):
    rows = groups()
    assert media_bytes(rows) == GROUPS * IMAGE
    size, back = send(rows)
    assert size < 1.01 * GROUPS * IMAGE
    assert media_bytes(back) == GROUPS * IMAGE
    for before, after in zip(rows["pixel_values"].tensors, back["pixel_values"].tensors, strict=True):
        assert torch.equal(before, after)
    assert send(groups(shared=False))[0] > ROWS * GROUPS * IMAGE


@pytest.mark.parametrize("packing", [False, True])
def test_a_shard_has_one_copy_of_the_media_of_each_of_its_groups(packing):
    rows = groups()
    plan: Any = {"max_tokens_per_microbatch": 40, "input_key": "input_ids", "input_lengths_key": "input_lengths",
                 "algorithm": "balanced", "sequence_length_pad_multiple": 1, "group_ids_key": "group_ids"}  # fmt: skip
    made = rows.shard_by_batch_size(GROUPS, sequence_packing_args=plan) if packing else None
    for shard in made[0] if made else rows.shard_by_batch_size(GROUPS, batch_size=None):
        assert len(set(shard["group_ids"].tolist())) == 1
        size, back = pickled(shard)
        assert size < 1.01 * IMAGE
        assert media_bytes(back) == IMAGE


def test_other_operations_keep_one_copy():
    rows = groups()
    joined = BatchedDataDict.from_batches([rows.slice(0, 7), rows.select_indices([20, 4, 9, 3])])
    assert media_bytes(joined) == 3 * IMAGE
    assert media_bytes(copy.deepcopy(rows)) == GROUPS * IMAGE
    assert media_bytes(BatchedDataDict({"pixel_values": rows["pixel_values"].to(dtype=torch.float16)})) == (
        GROUPS * IMAGE // 2
    )

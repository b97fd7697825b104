"""NeMo-RL's functions for microbatches and global batches on two gloo processes."""

from __future__ import annotations

import json

import pytest
from probe_forked import run_program

pytestmark = [
    pytest.mark.xdist_group("processing"),  # all cases share one start of the two ranks
]

RANKS = """
import datetime, json, os, sys
from types import SimpleNamespace
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from rlframework.nemo_rl.microbatches import get_microbatch_iterator, process_global_batch, process_microbatch
from rlframework.batch.batched_data_dict import BatchedDataDict

folder = sys.argv[1]
rank = 0 if os.fork() else 1
dist.init_process_group(
    "gloo", init_method="file://" + folder + "/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120)
)
found = {}

def record(name, call):
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

record("counts", lambda: counts(batch(2 + rank), 2 + rank, world))
record("none here", lambda: counts(planned([], 0) if rank else batch(2), None if rank else 2, world))
record("not summed", lambda: counts(batch(2 + rank), 2 + rank, None))
ranges = [[[0, 1], [1, 3]], [[0, 1], [1, 2], [2, 4], [4, 5], [5, 6]]][rank]
rows = [3, 6][rank]
record("packed", lambda: numbers(planned(ranges, rows), packed, mesh))
record("group", lambda: numbers(planned(ranges, rows), packed, world))
record("default", lambda: numbers(planned(ranges, rows), packed, None))
record("one rank groups", lambda: numbers(planned(ranges, rows), packed, alone))
record("fixed", lambda: numbers(batch(1 + 2 * rank), {"dynamic_batching": off}, mesh))
def no_rows(cfg):
    data = planned([], 0) if rank else planned([[0, 2], [2, 3]], 3)
    iterator, count = get_microbatch_iterator(data, cfg, 1, mesh, tokenizer)
    parts = list(iterator)
    shapes = {key: [list(p.data_dict[key].shape) for p in parts] for key in ("input_ids", "number", "lists")}
    masks = [p.data_dict[key].sum().item() for p in parts for key in ("token_mask", "sample_mask")]
    lengths = [p.data_dict["input_lengths"].tolist() for p in parts]
    return count, [p.processed_inputs.seq_len for p in parts], shapes, sum(masks), lengths
record("no rows packed", lambda: no_rows(packed))
record("no rows fixed", lambda: numbers(batch(0 if rank else 2), {"dynamic_batching": off}, mesh))
two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
record("two dimensions", lambda: numbers(batch(1), {"dynamic_batching": off}, two))
def split():
    from torch.distributed.tensor.experimental import context_parallel
    data = batch(2)
    inputs = process_microbatch(data, tokenizer, False, {}, cp_size=2)
    with context_parallel(mesh, buffers=inputs.cp_buffers, buffer_seq_dims=[1, 1, 1]):
        inside = [inputs.input_ids.tolist(), inputs.position_ids.tolist(), inputs.seq_index.tolist()]
    return inside, data["input_ids"].tolist()
record("split", split)
open(folder + f"/{rank}.json", "w").write(json.dumps(found))
dist.destroy_process_group()
if rank == 0:
    sys.exit(os.wait()[1])
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done = run_program(RANKS, folder, warnings=["ignore"])
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


def test_a_process_group_and_the_default_act_like_a_mesh(ranks):
    assert (
        [rank["group"] for rank in ranks] == [rank["default"] for rank in ranks] == [rank["packed"] for rank in ranks]
    )


def test_a_rank_without_rows_runs_dummies_that_contribute_nothing(ranks):
    count, widths, shapes, masks, lengths = ranks[1]["no rows packed"]
    assert (count, widths, masks, lengths) == (0, [1, 1], 0, [[1], [1]])
    assert shapes == {"input_ids": [[1, 1]] * 2, "number": [[1]] * 2, "lists": [[1, 1, 3]] * 2}
    assert ranks[0]["no rows packed"][:2] == [2, [8, 4]]


def test_a_mesh_of_two_dimensions_is_rejected(ranks):
    for rank in ranks:
        assert rank["two dimensions"].startswith("BatchError: dp_mesh has the dimensions ('dp', 'tp'); pass the")

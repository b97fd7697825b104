"""`all_gather` over three gloo ranks, processes forked from one that has torch; all cases in one go."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.xdist_group("collectives")  # one start of the ranks serves all

RANKS = """
import datetime, json, os, sys
import torch
import torch.distributed as dist
from rlframework.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from rlframework.distributed.collectives import gather_jagged_object_lists, rebalance_nd_tensor

folder = sys.argv[1]
rank = 0 if os.fork() else 1
if rank == 0 and not os.fork():
    rank = 2
dist.init_process_group(
    "gloo", init_method="file://" + folder + "/store", rank=rank, world_size=3, timeout=datetime.timedelta(seconds=30)
)
found = {}

def told(name, call):
    try:
        found[name] = call()
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"

def lists(batch):
    return {k: v if isinstance(v, list) else v.float().tolist() for k, v in batch.items()}

rows = [2, 0, 1][rank]
base = torch.arange(rows) + 10 * rank
kinds = ["bool", "uint8", "int16", "int64", "bfloat16", "float16", "float64"]
told("dtypes", lambda: {k: rebalance_nd_tensor((base % 3).to(getattr(torch, k))).float().tolist() for k in kinds})
told("kept", lambda: [str(rebalance_nd_tensor(base.to(getattr(torch, k))).dtype) for k in kinds])
told("two", lambda: rebalance_nd_tensor(base[:, None] + torch.tensor([0.0, 0.5])).tolist())
told("wide", lambda: rebalance_nd_tensor((torch.arange(12.0).reshape(4, 3).T)[: rows]).tolist())
told("objects", lambda: gather_jagged_object_lists([f"{rank}.{i}" for i in range(rows)]))
told("batch", lambda: lists(BatchedDataDict(x=base, t=[str(int(b)) for b in base]).all_gather(None)))
told("class", lambda: type(SlicedDataDict(x=base).all_gather(None)).__name__)
told("lacking", lambda: lists(BatchedDataDict({} if rank == 1 else {"x": base, "t": ["q"] * rows}).all_gather(None)))
told("nothing", lambda: lists(BatchedDataDict().all_gather(None)))
told("empty", lambda: list(BatchedDataDict(x=torch.zeros(0, 4)).all_gather(None)["x"].shape))
told("missing", lambda: lists(BatchedDataDict({"x": base} if rank == 2 else {"y": base}).all_gather(None)))
told("mixed", lambda: lists(BatchedDataDict(x=[1] if rank == 2 else base).all_gather(None)))
told("shapes", lambda: lists(BatchedDataDict(x=torch.zeros(1, 1 + rank)).all_gather(None)))
told("uneven", lambda: lists(BatchedDataDict(x=base, y=[0] * (rows + (rank == 2))).all_gather(None)))
pair = dist.new_group([0, 2])
if rank != 1:
    told("pair", lambda: lists(BatchedDataDict(x=base).all_gather(pair)))
open(folder + f"/{rank}.json", "w").write(json.dumps(found))
dist.destroy_process_group()
if rank == 0:
    sys.exit(max(os.wait()[1], os.wait()[1]))
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-c", RANKS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


EXPECTED = {
    # rows: rank 0 has 0 and 1, rank 1 none, rank 2 has 20
    "two": [[0, 0.5], [1, 1.5], [20, 20.5]],
    "wide": [[0, 3, 6, 9], [1, 4, 7, 10], [0, 3, 6, 9]],
    "objects": ["0.0", "0.1", "2.0"],
    "batch": {"x": [0, 1, 20], "t": ["0", "1", "20"]},
    "class": "SlicedDataDict",
    "lacking": {"x": [0, 1, 20], "t": ["q", "q", "q"]},
    "nothing": {},
    "empty": [0, 4],
    "kept": ["torch." + k for k in ("bool", "uint8", "int16", "int64", "bfloat16", "float16", "float64")],
}


@pytest.mark.parametrize("case", EXPECTED)
def test_every_rank_gets_all_rows_in_rank_order(ranks, case):
    assert [rank[case] for rank in ranks] == [EXPECTED[case]] * 3


def test_every_dtype(ranks):
    for rank in ranks:
        assert rank["dtypes"].pop("bool") == [0, 1, 1]
        assert list(rank["dtypes"].values()) == [[0, 1, 2]] * 6


def test_a_part_of_the_ranks(ranks):
    assert [rank.get("pair") for rank in ranks] == [{"x": [0, 1, 20]}, None, {"x": [0, 1, 20]}]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing", "BatchError: all_gather: key 'x' is missing on rank 0 of 3"),
        ("mixed", "BatchError: all_gather: 'x' is a list on some ranks and a tensor on others"),
        ("shapes", "BatchError: all_gather: 'x' differs between ranks in more than the number of rows"),
        ("uneven", "BatchError: rank 2: all values of the batch must have the same number of rows"),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_all(ranks, case, message):
    for rank in ranks:
        assert rank[case].startswith(message), rank[case]

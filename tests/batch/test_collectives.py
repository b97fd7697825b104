"""`all_gather` over three gloo ranks, forked from one process that has imported torch; all cases in one run."""

from __future__ import annotations

import json

import pytest
from probe_forked import run_program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("collectives"),  # one start of the ranks serves all
]

RANKS = """
import datetime, json, os, sys
import torch
import torch.distributed as dist
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.batch.batched_data_dict import BatchedDataDict, SlicedDataDict
from rlframework.batch.collectives import gather_jagged_object_lists, rebalance_nd_tensor

folder = sys.argv[1]
try:
    BatchedDataDict(x=[1]).all_gather(None)
except Exception as error:
    early = f"{type(error).__name__}: {error}"
rank = 0 if os.fork() else 1
if rank == 0 and not os.fork():
    rank = 2
dist.init_process_group(
    "gloo", init_method="file://" + folder + "/store", rank=rank, world_size=3, timeout=datetime.timedelta(seconds=120)
)
found = {"early": early}

def record(name, call):
    try:
        found[name] = call()
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"

def lists(batch):
    return {k: v if isinstance(v, list) else v.float().tolist() for k, v in batch.items()}

rows = [2, 0, 1][rank]
base = torch.arange(rows) + 10 * rank
kinds = sys.argv[2:]
record("dtypes", lambda: {k: rebalance_nd_tensor((base % 3).to(getattr(torch, k))).float().tolist() for k in kinds})
record("kept", lambda: [str(rebalance_nd_tensor(base.to(getattr(torch, k))).dtype) for k in kinds])
record("two", lambda: rebalance_nd_tensor(base[:, None] + torch.tensor([0.0, 0.5])).tolist())
record("wide", lambda: rebalance_nd_tensor((torch.arange(12.0).reshape(4, 3).T)[: rows]).tolist())
record("complex", lambda: torch.view_as_real(rebalance_nd_tensor((base * (1 + 2j)).cfloat().conj())).tolist())
record("step", lambda: rebalance_nd_tensor(torch.arange(100)[7 :: 50][: rows] * (rank != 1)).tolist())
record("grad", lambda: rebalance_nd_tensor(torch.ones(rows, requires_grad=True) * 2).requires_grad)
media = [[torch.ones(2, 3), None], [], [torch.full((1, 3), 7, dtype=torch.int16)]][rank]
same = [[torch.ones(1, 2), torch.full((3, 2), 2.0)], [], [torch.full((1, 2), 3.0)]][rank]
packs = lambda rows, dim=0: PackedTensor(rows, dim)
shown = lambda packed: [packed.dim_to_pack, [None if r is None else [str(r.dtype), r.tolist()] for r in packed.tensors]]
record("packed", lambda: shown(BatchedDataDict(p=packs(media), x=base).all_gather()["p"]))
record("joined", lambda: BatchedDataDict(p=packs(same)).all_gather()["p"].as_tensor().tolist())
record("packed lacking", lambda: shown(BatchedDataDict({} if rank == 1 else {"p": packs(media)}).all_gather()["p"]))
record("no media", lambda: shown(BatchedDataDict(p=packs([None] * rows)).all_gather()["p"]))
record("no rows of any kind", lambda: lists(BatchedDataDict(x=[] if rank else torch.zeros(0)).all_gather()))
record("empty kind", lambda: lists(BatchedDataDict(x=[[4], torch.zeros(0, 9), [5]][rank]).all_gather()))
record("equal", lambda: rebalance_nd_tensor(torch.full((2, 2), rank)).tolist())
record("no columns", lambda: list(rebalance_nd_tensor(torch.zeros(2, 0)).shape))
record("dims", lambda: BatchedDataDict(p=packs([torch.ones(1, 1)], rank % 2)).all_gather())
record("kinds", lambda: BatchedDataDict(p=packs([torch.ones(1, 1)]) if rank else torch.ones(1)).all_gather())
record("unpicklable", lambda: BatchedDataDict(t=[(lambda: 1) if rank == 1 else 1]).all_gather())
record("meta", lambda: rebalance_nd_tensor(torch.zeros(1, device="meta" if rank == 2 else "cpu")))
record("no tensor", lambda: rebalance_nd_tensor([1] if rank == 0 else torch.zeros(1)))
record("no list", lambda: gather_jagged_object_lists(5 if rank == 2 else [1]))
record("objects", lambda: gather_jagged_object_lists([f"{rank}.{i}" for i in range(rows)]))
record("batch", lambda: lists(BatchedDataDict(x=base, t=[str(int(b)) for b in base]).all_gather(None)))
record("class", lambda: type(SlicedDataDict(x=base).all_gather(None)).__name__)
record("lacking", lambda: lists(BatchedDataDict({} if rank == 1 else {"x": base, "t": ["q"] * rows}).all_gather(None)))
record("nothing", lambda: lists(BatchedDataDict().all_gather(None)))
record("empty", lambda: list(BatchedDataDict(x=torch.zeros(0, 4)).all_gather(None)["x"].shape))
record("missing", lambda: lists(BatchedDataDict({"x": base} if rank == 2 else {"y": base}).all_gather(None)))
record("mixed", lambda: lists(BatchedDataDict(x=[1] if rank == 2 else base).all_gather(None)))
record("shapes", lambda: lists(BatchedDataDict(x=torch.zeros(1, 1 + rank)).all_gather(None)))
record("uneven", lambda: lists(BatchedDataDict(x=base, y=[0] * (rows + (rank == 2))).all_gather(None)))
pair = dist.new_group([0, 2])
if rank != 1:
    record("pair", lambda: lists(BatchedDataDict(x=base).all_gather(pair)))
    record("pair packed", lambda: shown(BatchedDataDict(p=packs(media)).all_gather(pair)["p"]))
else:
    record("outside", lambda: BatchedDataDict(x=base).all_gather(pair))
    record("outside objects", lambda: gather_jagged_object_lists([1], pair))
    record("outside tensor", lambda: rebalance_nd_tensor(base, pair))
open(folder + f"/{rank}.json", "w").write(json.dumps(found))
dist.destroy_process_group()
if rank == 0:
    sys.exit(max(os.wait()[1], os.wait()[1]))
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done = run_program(RANKS, folder, *KINDS)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


KINDS = ["bool", "int8", "uint8", "int16", "int64", "uint64", "float8_e4m3fn", "bfloat16", "float16", "float64"]
PACKED = [0, [["torch.float32", [[1, 1, 1], [1, 1, 1]]], None, ["torch.int16", [[7, 7, 7]]]]]
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
    "kept": ["torch." + kind for kind in KINDS],
    "complex": [[0, 0], [1, -2], [20, -40]],
    "step": [7, 57, 7],
    "grad": False,
    "packed": PACKED,
    "joined": [[1, 1], [2, 2], [2, 2], [2, 2], [3, 3]],
    "packed lacking": PACKED,
    "no media": [0, [None, None, None]],
    "no rows of any kind": {"x": []},
    "empty kind": {"x": [4, 5]},
    "equal": [[0, 0], [0, 0], [1, 1], [1, 1], [2, 2], [2, 2]],
    "no columns": [6, 0],
}


@pytest.mark.parametrize("case", EXPECTED)
def test_every_rank_gets_all_rows_in_rank_order(ranks, case):
    assert [rank[case] for rank in ranks] == [EXPECTED[case]] * 3


def test_every_dtype(ranks):
    for rank in ranks:
        assert rank["dtypes"].pop("bool") == [0, 1, 1]
        assert list(rank["dtypes"].values()) == [[0, 1, 2]] * 9


def test_a_group_of_some_of_the_ranks(ranks):
    assert [rank.get("pair") for rank in ranks] == [{"x": [0, 1, 20]}, None, {"x": [0, 1, 20]}]
    assert [rank.get("pair packed") for rank in ranks] == [PACKED, None, PACKED]


@pytest.mark.parametrize("case", ["outside", "outside objects", "outside tensor"])
def test_a_rank_that_is_not_in_the_group(ranks, case):
    assert ranks[1][case].startswith("BatchError: rank 1 is not in the process group"), ranks[1][case]


def test_without_process_groups(ranks):
    for rank in ranks:
        assert rank["early"].startswith("BatchError: no process group to gather over; call torch.dist")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing", "BatchError: all_gather: key 'x' is missing on rank 0 of 3"),
        ("mixed", "BatchError: all_gather: 'x' is a list on some ranks and a tensor on others"),
        ("shapes", "BatchError: all_gather: 'x' differs between ranks in more than the number of rows"),
        ("dims", "BatchError: all_gather: 'p' differs between ranks in dim_to_pack: [0, 1]"),
        ("kinds", "BatchError: all_gather: 'p' is a PackedTensor on some ranks and a tensor on others"),
        ("unpicklable", "BatchError: rank 1: an element of 't' cannot be pickled: "),
        ("meta", "BatchError: rank 2: 'tensor' has a tensor that cannot be sent: device meta"),
        ("no tensor", "BatchError: rank 0: 'tensor' must be a tensor, got a list"),
        ("no list", "BatchError: rank 2: the value of 'objects' is a int"),
        ("uneven", "BatchError: rank 2: all values of the batch must have the same number of rows"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(ranks, case, message):
    for rank in ranks:
        assert rank[case].startswith(message), rank[case]

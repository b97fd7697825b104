"""Where each rank stands and which piece of a weight it has, rank by rank, without other processes.

Torch's "fake" process group says that there are others; nothing here talks to them. Each rank is a thread that lives
until the test ends: torch knows meshes of the same ranks apart by their threads, and remembers what it did with them.
"""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlframework.config.policy import ParallelismConfig
from rlframework.errors import ConfigError
from rlframework.interfaces.named_sharding import policy_sharding
from rlframework_dtensor.mesh import Mesh, Sizes
from rlframework_dtensor.shards import local, own_part, put
from rlframework_dtensor.styles import cut, vocabulary_rows

LAYOUTS = [  # workers, context, tensor, replicate
    (1, 1, 1, 1),
    (4, 1, 1, 2),
    (4, 2, 2, 1),
    (6, 1, 2, 1),
    (8, 2, 2, 2),
    (12, 1, 2, 2),
]


@pytest.fixture
def on_rank():
    """`on_rank(rank, workers, work)`: what `work()` gives where the default group says that this is `rank`."""
    done, threads = threading.Event(), []

    def run(rank, workers, work):
        finished, found = threading.Event(), []

        def body():
            dist.init_process_group("fake", rank=rank, world_size=workers, store=FakeStore())
            try:
                found.append(work())
            except BaseException as error:  # noqa: BLE001  # raised again below
                found.append(error)
            finally:
                dist.destroy_process_group()
                finished.set()
            done.wait(60)

        threads.append(threading.Thread(target=body))
        threads[-1].start()
        assert finished.wait(60)
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    yield run
    done.set()
    for thread in threads:
        thread.join()


def make(workers, context, tensor, replicate):
    return Mesh(Sizes.of(workers, ParallelismConfig(context=context, tensor=tensor), replicate), "cpu")


def ranks_in(group, alone):
    return [alone] if group is None else sorted(dist.get_process_group_ranks(group))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_are_those_of_the_named_sharding(on_rank, layout):
    workers, context, tensor, _ = layout
    sharding = policy_sharding(workers, ParallelismConfig(context=context, tensor=tensor))
    for rank in range(workers):
        coords = sharding.get_worker_coords(rank)

        def along(axis, coords=coords):
            return sharding.get_ranks_by_coord(**{name: at for name, at in coords.items() if name != axis})

        def check(rank=rank, coords=coords, along=along):
            mesh = make(*layout)
            assert ranks_in(mesh.data_group(), rank) == along("data_parallel")
            assert ranks_in(mesh.context_group(), rank) == along("context_parallel")
            assert ranks_in(mesh.tensor_group(), rank) == along("tensor_parallel")
            assert mesh.context_rank == coords["context_parallel"]
            assert mesh.tensor_rank == coords["tensor_parallel"]
            shards = ranks_in(mesh.shard_group(), rank)
            assert set(shards) & set(along("tensor_parallel")) == {rank}
            assert len(shards) == workers // tensor // mesh.sizes.data_replicate

        on_rank(rank, workers, check)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_are_where_fsdp_and_tensor_parallelism_put_them(on_rank, layout):
    """Of sizes that do not divide: 23 rows over two, three or six. All pieces together are the whole."""
    workers, _, tensor, replicate = layout
    values = {"rows": torch.randn(23, 5), "columns": torch.randn(7, 6), "copied": torch.randn(11)}
    seen = {name: torch.zeros_like(value) for name, value in values.items()}

    def check():
        mesh = make(*layout)
        module = nn.ParameterDict({name: nn.Parameter(value.clone()) for name, value in values.items()})
        if tensor > 1:
            cut(module, "rows", mesh.tensor, Shard(0))
            cut(module, "columns", mesh.tensor, Shard(1))
            cut(module, "copied", mesh.tensor, Replicate())
        fully_shard(module, mesh=mesh.fsdp)
        for name, parameter in module.named_parameters():
            piece = values[name][own_part(parameter)]
            assert torch.equal(local(parameter), piece)
            other = torch.zeros_like(parameter)
            put(other, values[name])
            assert torch.equal(local(other), piece)
            seen[name][own_part(parameter)] += 1

    for rank in range(workers):
        on_rank(rank, workers, check)
    assert (seen["rows"] == replicate).all()
    assert (seen["columns"] == replicate).all()
    assert (seen["copied"] == replicate * tensor).all()


@pytest.mark.parametrize(("vocabulary", "ranks"), [(23, 2), (23, 6), (8, 4), (5, 4)])
def test_rows_of_the_vocabulary_are_as_torch_cuts_them(on_rank, vocabulary, ranks):
    wanted = [part.tolist() for part in torch.arange(vocabulary).chunk(ranks)]
    wanted += [[]] * (ranks - len(wanted))
    for rank in range(ranks):
        start, rows = on_rank(rank, ranks, lambda: vocabulary_rows(vocabulary, make(ranks, 1, ranks, 1).tensor))
        assert list(range(start, start + rows)) == wanted[rank]


def test_workers_that_do_not_factor_are_refused():
    with pytest.raises(
        ConfigError, match=r"6 workers cannot hold whole replicas of the model: pipeline 1 x context 2 x tensor 2"
    ):
        Sizes.of(6, ParallelismConfig(context=2, tensor=2))
    with pytest.raises(ConfigError, match=r"policy\.dtensor\.replicate=2 does not divide 3"):
        Sizes.of(6, ParallelismConfig(tensor=2), replicate=2)

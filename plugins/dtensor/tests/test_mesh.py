"""Each rank's coordinates and shards, rank by rank in a single process.

Torch's "fake" process group reports ranks that do not exist; no test communicates. Each rank is a thread that lives
until the test ends, because torch identifies meshes over the same ranks by their threads and caches what it did with
them.
"""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlframework.base.errors import ConfigError
from rlframework.config.policy import ParallelismConfig
from rlframework.interfaces.named_sharding import policy_sharding
from rlframework.policy.shared_state import TrainingProgress
from rlframework_dtensor.mesh import Mesh, Sizes
from rlframework_dtensor.nemo_rl import NeMoRLMethods
from rlframework_dtensor.shards import copy_into_shard, local_slices, local_tensor
from rlframework_dtensor.styles import shard_parameter, vocabulary_rows

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
    """`on_rank(rank, workers, work)`: the result of `work()` with a default group in which this process is `rank`."""
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
def test_groups_match_the_named_sharding(on_rank, layout):
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
            assert mesh.tensor_rank == coords["tensor_parallel"]
            shards = ranks_in(mesh.shard_group(), rank)
            assert set(shards) & set(along("tensor_parallel")) == {rank}
            assert len(shards) == workers // tensor // mesh.sizes.data_replicate

        on_rank(rank, workers, check)


def test_a_closed_mesh_keeps_no_process_group(on_rank):
    """Although the mesh itself is kept, as by torch's caches."""

    def closed():
        mesh = make(4, 1, 2, 1)
        groups = [weakref.ref(group) for group in (mesh.data_group(), mesh.tensor_group(), mesh.shard_group())]
        assert all(group() is not None for group in groups)
        dist.destroy_process_group()
        mesh.close()
        dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())  # for `on_rank` to destroy
        return mesh, groups

    _mesh, groups = on_rank(0, 4, closed)
    gc.collect()
    assert [group() for group in groups] == [None] * 3


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_local_slices_match_fsdp_over_tensor_parallelism(on_rank, layout):
    """With uneven sizes: 23 rows over two, three or six ranks. The shards together cover the whole."""
    workers, _, tensor, replicate = layout
    values = {"rows": torch.randn(23, 5), "columns": torch.randn(7, 6), "copied": torch.randn(11)}
    seen = {name: torch.zeros_like(value) for name, value in values.items()}

    def check():
        mesh = make(*layout)
        module = nn.ParameterDict({name: nn.Parameter(value.clone()) for name, value in values.items()})
        if tensor > 1:
            shard_parameter(module, "rows", mesh.tensor, Shard(0))
            shard_parameter(module, "columns", mesh.tensor, Shard(1))
            shard_parameter(module, "copied", mesh.tensor, Replicate())
        fully_shard(module, mesh=mesh.fsdp)
        for name, parameter in module.named_parameters():
            shard = values[name][local_slices(parameter)]
            assert torch.equal(local_tensor(parameter), shard)
            other = torch.zeros_like(parameter)
            copy_into_shard(other, values[name])
            assert torch.equal(local_tensor(other), shard)
            seen[name][local_slices(parameter)] += 1

    for rank in range(workers):
        on_rank(rank, workers, check)
    assert (seen["rows"] == replicate).all()
    assert (seen["columns"] == replicate).all()
    assert (seen["copied"] == replicate * tensor).all()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_noise_covers_each_weight_and_is_equal_on_replicas(on_rank, layout):
    """Ranks do not communicate: each must draw the same noise for a weight, and add its own slice of it."""
    workers, _, tensor, _ = layout
    shapes = {"rows": (23, 5), "columns": (7, 6), "copied": (11,)}
    found = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}

    def check():
        mesh = make(*layout)
        module = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})
        if tensor > 1:
            shard_parameter(module, "rows", mesh.tensor, Shard(0))
            shard_parameter(module, "columns", mesh.tensor, Shard(1))
            shard_parameter(module, "copied", mesh.tensor, Replicate())
        fully_shard(module, mesh=mesh.fsdp)
        worker = NeMoRLMethods()
        worker.engine, worker.progress = SimpleNamespace(model=module), TrainingProgress()
        worker._add_noise_to_weights()
        for name, parameter in module.named_parameters():
            place, noise = local_slices(parameter), local_tensor(parameter)
            known = ~found[name][place].isnan()
            assert torch.equal(found[name][place][known], noise[known])
            found[name][place] = noise.detach()

    for rank in range(workers):
        on_rank(rank, workers, check)
    for name, noise in found.items():
        assert noise.unique().numel() == noise.numel(), name  # drawn for each element, on some rank


@pytest.mark.parametrize(("vocabulary", "ranks"), [(23, 2), (23, 6), (8, 4), (5, 4)])
def test_vocabulary_rows_match_torchs_chunks(on_rank, vocabulary, ranks):
    wanted = [part.tolist() for part in torch.arange(vocabulary).chunk(ranks)]
    wanted += [[]] * (ranks - len(wanted))
    for rank in range(ranks):
        start, rows = on_rank(rank, ranks, lambda: vocabulary_rows(vocabulary, make(ranks, 1, ranks, 1).tensor))
        assert list(range(start, start + rows)) == wanted[rank]


def test_sizes_that_do_not_factor_are_rejected():
    with pytest.raises(
        ConfigError, match=r"6 workers cannot hold whole replicas of the model: pipeline 1 x context 2 x tensor 2"
    ):
        Sizes.of(6, ParallelismConfig(context=2, tensor=2))
    with pytest.raises(ConfigError, match=r"policy\.dtensor\.replicate=2 does not divide 3"):
        Sizes.of(6, ParallelismConfig(tensor=2), replicate=2)

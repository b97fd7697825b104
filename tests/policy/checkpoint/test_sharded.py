"""The sharded form on its own: compatibility with torch's DCP, and rejected files."""

from __future__ import annotations

import errno
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from rlframework.base.errors import DataError, WriteError
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.checkpoint.manifest import MANIFEST, check_files, write_manifest
from rlframework.policy.checkpoint.sharded import CheckpointSave, DirectoryPlan
from rlframework.policy.engine import TensorShard
from rlframework.policy.trained_weights import open_saved


def halves(name: str, whole: torch.Tensor, split: int) -> list[TensorShard]:
    """`whole` as two shards along dimension 0."""
    first, second = whole[:split].clone(), whole[split:].clone()
    rest = (0,) * (whole.ndim - 1)
    return [
        TensorShard(name, first, (0, *rest), tuple(whole.shape)),
        TensorShard(name, second, (split, *rest), tuple(whole.shape)),
    ]


@pytest.fixture
def tensors():
    return {
        "matrix": torch.arange(35.0).reshape(7, 5),
        "vector": torch.arange(3.0),
        "number": torch.tensor(2.5),
        "cube": torch.arange(24.0).reshape(2, 3, 4),
    }


@pytest.fixture
def folder(tensors, tmp_path) -> Path:
    """A checkpoint of `tensors` in uneven shards, one of them empty."""
    shards = [
        *halves("matrix", tensors["matrix"], 4),
        *halves("vector", tensors["vector"], 3),
        *halves("cube", tensors["cube"], 1),
        TensorShard("number", tensors["number"], (), ()),
    ]
    save([DirectoryPlan(str(tmp_path / "saved"), shards, lambda made: None)])
    return tmp_path / "saved"


def save(plans: list[DirectoryPlan], *, asynchronous: bool = False) -> None:
    CheckpointSave(plans, WorkerContext(), asynchronous=asynchronous).finish()


def test_any_slice_can_be_read_from_any_shards(folder, tensors):
    with open_saved(folder) as saved:
        assert {name: saved.shape(name) for name in saved} == {name: tuple(t.shape) for name, t in tensors.items()}
        for name, tensor in tensors.items():
            assert torch.equal(saved[name], tensor)
        for where in ((slice(3, 6), slice(1, 4)), (slice(0, 7), slice(4, 5)), (slice(5, 5), slice(0, 5))):
            assert torch.equal(saved.read_slice("matrix", where), tensors["matrix"][where])


def test_dcp_itself_reads_what_was_written(folder, tensors):
    found = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about running in a single process
        dcp.load(found, checkpoint_id=str(folder), no_dist=True)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)


def test_an_index_cannot_run_code(folder):
    class Evil:
        def __reduce__(self):
            return Path.touch, (folder / "ran",)

    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    with (
        pytest.raises(DataError, match=r"\.metadata is damaged or cannot be read: .*which no checkpoint index"),
        open_saved(folder),
    ):
        pass
    assert not (folder / "ran").exists()


def test_shards_must_cover_the_whole_once(tmp_path):
    whole = torch.arange(10.0)
    save([DirectoryPlan(str(tmp_path / "gap"), halves("a", whole, 4)[:1], lambda made: None)])
    with open_saved(tmp_path / "gap") as saved, pytest.raises(DataError, match="shards of a do not cover the whole"):
        saved["a"]
    shards = [TensorShard("a", whole[:6], (0,), (10,)), TensorShard("a", whole[4:], (4,), (10,))]
    with pytest.raises(DataError, match=r"the workers' shards do not cover the tensors of .*/saved: "):
        save([DirectoryPlan(str(tmp_path / "saved"), shards, lambda made: None)])
    assert [path.name for path in tmp_path.iterdir()] == ["gap"]


def test_an_asynchronous_save_has_the_values_at_its_start(tmp_path):
    tensor = torch.zeros(1000)
    shards = [TensorShard("a", tensor, (0,), (1000,))]
    running = CheckpointSave(
        [DirectoryPlan(str(tmp_path / "saved"), shards, lambda made: None)], WorkerContext(), asynchronous=True
    )
    tensor.fill_(1.0)
    running.finish()
    with open_saved(tmp_path / "saved") as saved:
        assert torch.equal(saved["a"], torch.zeros(1000))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_save_raises_and_keeps_the_old_checkpoint(folder, tensors, monkeypatch, asynchronous):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    shards = [TensorShard("matrix", torch.zeros(7, 5), (0, 0), (7, 5))]
    with pytest.raises(WriteError, match="saved: there is no space left"):
        save([DirectoryPlan(str(folder), shards, lambda made: None)], asynchronous=asynchronous)
    check_files(folder, required=True)
    with open_saved(folder) as saved:
        assert torch.equal(saved["matrix"], tensors["matrix"])
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1234", "is truncated: it has 4 bytes, but 9 were"),
        (b"12345678X", "is damaged"),
        (b"1234567890", "is damaged"),
    ],
)
def test_a_changed_file_is_named(tmp_path, content, message):
    (tmp_path / "digits").write_bytes(b"123456789")
    check_files(tmp_path)
    with pytest.raises(DataError, match=f"has no {MANIFEST}"):
        check_files(tmp_path, required=True)
    write_manifest(tmp_path)
    check_files(tmp_path, required=True)
    (tmp_path / "digits").write_bytes(content)
    with pytest.raises(DataError, match=f"digits {message}"):
        check_files(tmp_path)


def test_each_rank_checks_all_sizes_and_its_share_of_contents(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"123456789")
    write_manifest(tmp_path)
    (tmp_path / "b").write_bytes(b"12345678X")
    check_files(tmp_path, share=(0, 2))
    with pytest.raises(DataError, match="b is damaged"):
        check_files(tmp_path, share=(1, 2))
    (tmp_path / "b").unlink()
    with pytest.raises(DataError, match="b is missing"):
        check_files(tmp_path, share=(0, 2))


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd"])
def test_names_that_lead_out_of_the_folder_are_refused(folder, name):
    index = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - written above
    next(iter(index.storage_data.values())).relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(DataError, match=r"\.metadata is damaged or cannot be read: .*outside its directory"):
        open_saved(folder)
    write_manifest(folder, {name: {"bytes": 1, "crc32": "0"}})
    with pytest.raises(DataError, match=r"checksums.json is damaged or cannot be read: .*outside its directory"):
        check_files(folder)

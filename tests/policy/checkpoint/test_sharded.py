"""The sharded form by itself: what torch's DCP reads of it, and what is not let in."""

from __future__ import annotations

import errno
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from rlframework.errors import DataError, UserError
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.checkpoint.manifest import MANIFEST, check_files, describe_file, write_manifest
from rlframework.policy.checkpoint.reader import open_saved
from rlframework.policy.checkpoint.sharded import CheckpointSave, DirectoryPlan
from rlframework.policy.model_state import Piece


def halves(name: str, whole: torch.Tensor, cut: int) -> list[Piece]:
    """`whole` in two pieces along dimension 0."""
    first, second = whole[:cut].clone(), whole[cut:].clone()
    rest = (0,) * (whole.ndim - 1)
    return [Piece(name, first, (0, *rest), tuple(whole.shape)), Piece(name, second, (cut, *rest), tuple(whole.shape))]


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
    """Where `tensors` lie, in pieces of unequal sizes; one of them is empty."""
    pieces = [
        *halves("matrix", tensors["matrix"], 4),
        *halves("vector", tensors["vector"], 3),
        *halves("cube", tensors["cube"], 1),
        Piece("number", tensors["number"], (), ()),
    ]
    save([DirectoryPlan(str(tmp_path / "saved"), pieces, lambda made: None)])
    return tmp_path / "saved"


def save(plans: list[DirectoryPlan], *, asynchronous: bool = False) -> None:
    CheckpointSave(plans, WorkerContext(), asynchronous=asynchronous).finish()


def test_any_part_is_read_from_any_pieces(folder, tensors):
    with open_saved(folder) as saved:
        assert {name: saved.shape(name) for name in saved} == {name: tuple(t.shape) for name, t in tensors.items()}
        for name, tensor in tensors.items():
            assert torch.equal(saved[name], tensor)
        for where in ((slice(3, 6), slice(1, 4)), (slice(0, 7), slice(4, 5)), (slice(5, 5), slice(0, 5))):
            assert torch.equal(saved.part("matrix", where), tensors["matrix"][where])


def test_dcp_itself_reads_what_was_written(folder, tensors):
    found = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        dcp.load(found, checkpoint_id=str(folder), no_dist=True)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)


def test_an_index_cannot_run_code(folder):
    class Evil:
        def __reduce__(self):
            return Path.touch, (folder / "ran",)

    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    with (
        pytest.raises(DataError, match=r"\.metadata is damaged or cannot be read: .*which no index"),
        open_saved(folder),
    ):
        pass
    assert not (folder / "ran").exists()


def test_pieces_that_leave_a_gap_are_told(tmp_path):
    whole = torch.arange(10.0)
    save([DirectoryPlan(str(tmp_path / "gap"), halves("a", whole, 4)[:1], lambda made: None)])
    with open_saved(tmp_path / "gap") as saved, pytest.raises(DataError, match="pieces of a do not make up the whole"):
        saved["a"]


def test_overlapping_pieces_are_refused(tmp_path):
    whole = torch.arange(10.0)
    pieces = [Piece("a", whole[:6], (0,), (10,)), Piece("a", whole[4:], (4,), (10,))]
    with pytest.raises(DataError, match=r"the workers' pieces do not make up the tensors of .*overlapping"):
        save([DirectoryPlan(str(tmp_path / "saved"), pieces, lambda made: None)])
    assert list(tmp_path.iterdir()) == []


def test_an_asynchronous_save_holds_what_was_there_when_it_began(tmp_path):
    tensor = torch.zeros(1000)
    pieces = [Piece("a", tensor, (0,), (1000,))]
    begun = CheckpointSave(
        [DirectoryPlan(str(tmp_path / "saved"), pieces, lambda made: None)], WorkerContext(), asynchronous=True
    )
    tensor.fill_(1.0)
    begun.finish()
    with open_saved(tmp_path / "saved") as saved:
        assert torch.equal(saved["a"], torch.zeros(1000))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_is_told_and_leaves_what_was_there(folder, tensors, monkeypatch, asynchronous):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    pieces = [Piece("matrix", torch.zeros(7, 5), (0, 0), (7, 5))]
    with pytest.raises(UserError, match="saved: there is no space left"):
        save([DirectoryPlan(str(folder), pieces, lambda made: None)], asynchronous=asynchronous)
    check_files(folder, required=True)
    with open_saved(folder) as saved:
        assert torch.equal(saved["matrix"], tensors["matrix"])
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]


def test_a_manifest_says_the_crc_of_zip_and_png(tmp_path):
    """The check value that the description of CRC-32 gives: of the nine digits."""
    (tmp_path / "digits").write_bytes(b"123456789")
    assert describe_file(tmp_path / "digits") == {"bytes": 9, "crc32": "cbf43926"}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"1234", "is truncated: it has 4 bytes, and 9 were"),
        (b"12345678X", "is damaged"),
        (b"1234567890", "is damaged"),
    ],
)
def test_a_file_that_is_not_what_was_written_is_named(tmp_path, content, told):
    (tmp_path / "digits").write_bytes(b"123456789")
    write_manifest(tmp_path)
    check_files(tmp_path)
    (tmp_path / "digits").write_bytes(content)
    with pytest.raises(DataError, match=f"digits {told}"):
        check_files(tmp_path)


def test_the_sizes_are_every_ranks_to_look_at_and_the_bytes_are_shared(tmp_path):
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


def test_a_manifest_is_needed_where_it_is_required(tmp_path):
    check_files(tmp_path)
    with pytest.raises(DataError, match=f"has no {MANIFEST}"):
        check_files(tmp_path, required=True)

"""Files and directories that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlframework.base.errors import UserError, WriteError
from rlframework.base.files import (
    check_writable,
    remove_directory,
    remove_temporary,
    replacing_directory,
    write_atomically,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail_with(number: int) -> object:
    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number), *map(str, args[:1]))

    return fail


def test_a_file_is_written_with_the_directories_above_it(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "b.txt", "grüße\n")
    write_atomically(str(tmp_path / "a" / "c.bin"), b"\x00\xff")
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"gr\xc3\xbc\xc3\x9fe\n"
    assert (tmp_path / "a" / "c.bin").read_bytes() == b"\x00\xff"
    assert names(tmp_path / "a") == ["b.txt", "c.bin"]


def test_a_new_file_has_the_permissions_that_any_new_file_gets(tmp_path: Path) -> None:
    write_atomically(tmp_path / "ours", "x")
    (tmp_path / "theirs").write_text("x")
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == stat.S_IMODE((tmp_path / "theirs").stat().st_mode)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_the_old_file_stays_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail_with(errno.ENOSPC))
        with pytest.raises(WriteError, match=f"cannot write {path}: there is no space left on the device; free some"):
            write_atomically(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["f"]


def test_the_temporary_file_goes_on_an_interruption_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(tmp_path / "f", "new")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EACCES, "permission denied; choose a writable location"),
        (errno.EPERM, "permission denied"),
        (errno.EROFS, "the file system is read-only"),
        (errno.ENOENT, "its directory was removed, or cannot be created"),
        (errno.ENOTDIR, "a component of the path is a file, not a directory"),
        (errno.ENAMETOOLONG, "a name in the path is too long"),
        (errno.EDQUOT, "the disk quota is exceeded"),
    ],
)
def test_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail_with(number))
        with pytest.raises(WriteError, match=reason):
            write_atomically(tmp_path / "f", "new")


def test_a_place_is_tried_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    check_writable(tmp_path / "deep" / "er")
    check_writable(tmp_path)
    with pytest.raises(UserError, match=f"cannot write {tmp_path}/file/below: a component of the path is a file"):
        check_writable(tmp_path / "file" / "below")
    assert names(tmp_path) == ["file"]
    monkeypatch.chdir(tmp_path)
    check_writable("relative/path")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", fail_with(errno.EROFS))
        with pytest.raises(UserError, match="the file system is read-only"):
            check_writable(tmp_path / "deep")


def test_a_path_through_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(WriteError, match="a component of the path is a file, not a directory"):
        write_atomically(tmp_path / "file" / "below", "x")
    with (
        pytest.raises(WriteError, match="a component of the path is a file"),
        replacing_directory(tmp_path / "file" / "below"),
    ):
        pass
    (tmp_path / "folder").mkdir()
    with pytest.raises(WriteError, match="it is a directory"):
        write_atomically(tmp_path / "folder", "x")


def test_other_errors_of_the_system_pass_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail_with(errno.EBUSY))
        with pytest.raises(OSError, match="busy"):
            write_atomically(tmp_path / "f", "new")


def test_a_directory_appears_whole_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with replacing_directory(target) as new:
        (new / "sub").mkdir()
        (new / "sub" / "weights").write_text("w")
        (new / "link").symlink_to("nowhere")
        assert not target.exists()
        assert new.parent == target.parent
    assert (target / "sub" / "weights").read_text() == "w"
    assert names(target.parent) == ["model"]


def test_files_of_a_directory_can_be_read_as_the_umask_says(tmp_path: Path) -> None:
    """safetensors writes files of mode 0600."""
    old = os.umask(0o027)
    try:
        with replacing_directory(tmp_path / "model") as folder:
            (folder / "below").mkdir()
            save_file({"a": torch.zeros(1)}, folder / "below" / "model.safetensors")
            os.symlink("nowhere", folder / "link")
            (folder / "program").touch(0o700)
    finally:
        os.umask(old)
    modes = [(tmp_path / "model" / name).stat().st_mode for name in ("below/model.safetensors", "program")]
    assert list(map(stat.S_IMODE, modes)) == [0o640, 0o740]


def test_what_was_there_is_replaced_not_mixed(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("x")
    with replacing_directory(target) as new:
        (new / "new").write_text("y")
        assert names(target) == ["old"]
    assert names(target) == ["new"]
    assert names(tmp_path) == ["model"]


def test_a_file_in_the_place_of_the_directory_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("x")
    with replacing_directory(tmp_path / "model") as new:
        (new / "new").write_text("y")
    assert names(tmp_path / "model") == ["new"]
    assert names(tmp_path) == ["model"]


def test_the_old_directory_stays_when_the_block_fails(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("x")

    def fill() -> None:
        with replacing_directory(target) as new:
            (new / "new").write_text("y")
            raise KeyError("in the block")

    with pytest.raises(KeyError):
        fill()
    assert names(target) == ["old"]
    assert names(tmp_path) == ["model"]


def test_the_old_directory_goes_back_when_the_swap_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("x")
    real = os.rename

    def rename(source: Path, destination: Path) -> None:
        if Path(source).suffix == ".tmp":
            raise OSError(errno.EACCES, "no", str(source))
        real(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(WriteError, match="permission denied"), replacing_directory(target) as new:
            (new / "new").write_text("y")
    assert names(target) == ["old"]
    assert names(tmp_path) == ["model"]


def test_a_full_disk_in_the_block_is_told_and_other_errors_are_the_blocks_own(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="there is no space left"), replacing_directory(tmp_path / "model"):
        raise OSError(errno.ENOSPC, "full")
    with pytest.raises(PermissionError), replacing_directory(tmp_path / "model"):
        raise PermissionError(errno.EACCES, "reading something else", "/elsewhere/file")
    assert names(tmp_path) == []


def test_a_private_file_is_private_before_it_has_a_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    monkeypatch.setattr(os, "fsync", lambda file: modes.append(stat.S_IMODE(os.fstat(file).st_mode)))
    monkeypatch.setattr(os, "fchmod", fail_with(errno.EPERM))
    write_atomically(tmp_path / "ours", "x", private=True)
    assert modes[0] == stat.S_IMODE((tmp_path / "ours").stat().st_mode) == 0o600


def test_links_are_removed_and_not_what_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").touch()
    (tmp_path / "run").mkdir()
    for name in (".step.0123456789ab.tmp", "step-1"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "theirs")
    remove_temporary(tmp_path / "run")
    remove_directory(tmp_path / "run" / "step-1")
    assert (names(tmp_path / "run"), names(tmp_path / "theirs")) == ([], ["file"])

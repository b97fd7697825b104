"""Files and directories are there whole or not at all; an error of the disk is one error, whichever library writes."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from rlframework.base.errors import DataError, UserError, WriteError
from rlframework.base.files import (
    AppendedFile,
    check_writable,
    remove_directory,
    remove_temporary,
    replacing_directory,
    require_space,
    write_atomically,
    writing,
)
from rlframework.config.sections import ObserversConfig
from rlframework.observers.dispatch import Observers
from rlframework.observers.jsonl import JsonlObserver, read_history
from rlframework.plugins.hookspec import RunInfo
from rlframework_preferences.reward_data import RewardData
from rlframework_report.services import TensorBoardObserver

LIMIT = 50_000


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, owner: object, function: str, number: int | None) -> Iterator[None]:
    """Calls of a function raise the error of that number, or an interrupt."""

    def fail(*args: object, **keys: object) -> None:
        raise KeyboardInterrupt if number is None else OSError(number, os.strerror(number), *map(str, args[:1]))

    with monkeypatch.context() as patch:
        patch.setattr(owner, function, fail)
        yield


@contextmanager
def file_limit(size: int = LIMIT) -> Iterator[None]:
    """Limit files to `size` bytes: writes beyond fail with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_written_with_the_directories_above_it(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "b.txt", "grüße\n")
    write_atomically(str(tmp_path / "a" / "c.bin"), b"\x00\xff")
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"gr\xc3\xbc\xc3\x9fe\n"
    assert (tmp_path / "a" / "c.bin").read_bytes() == b"\x00\xff"
    assert names(tmp_path / "a") == ["b.txt", "c.bin"]
    (tmp_path / "plain").touch()
    assert stat.S_IMODE((tmp_path / "a/b.txt").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.parametrize(
    ("step", "error", "kind", "reason"),
    [
        ("fsync", errno.ENOSPC, WriteError, "cannot write {0}/f: there is no space left on the device; free some"),
        ("replace", errno.EDQUOT, WriteError, "the disk quota is exceeded"),
        ("replace", errno.EACCES, WriteError, "permission denied; choose a writable location"),
        ("replace", errno.EPERM, WriteError, "permission denied"),
        ("replace", errno.EROFS, WriteError, "the file system is read-only"),
        ("replace", errno.ENOENT, WriteError, "its directory was removed, or cannot be created"),
        ("replace", errno.ENOTDIR, WriteError, "a component of the path is a file, not a directory"),
        ("replace", errno.ENAMETOOLONG, WriteError, "a name in the path is too long"),
        ("replace", errno.EBUSY, OSError, "busy"),
        ("replace", None, KeyboardInterrupt, "^$"),
    ],
)
def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch, step, error, kind, reason) -> None:
    (tmp_path / "f").write_text("old")
    with failing(monkeypatch, os, step, error), pytest.raises(kind, match=reason.format(tmp_path)):
        write_atomically(tmp_path / "f", "new")
    assert ((tmp_path / "f").read_text(), names(tmp_path)) == ("old", ["f"])


def test_a_path_is_checked_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "deep" / "er", tmp_path, "relative/path"):
        check_writable(path)
    with pytest.raises(UserError, match=f"cannot write {tmp_path}/file/below: a component of the path is a file"):
        check_writable(tmp_path / "file" / "below")
    with failing(monkeypatch, Path, "mkdir", errno.EROFS), pytest.raises(UserError, match="read-only"):
        check_writable(tmp_path / "deep")
    assert names(tmp_path) == ["file"]


def test_a_path_through_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for write in (lambda path: write_atomically(path, "x"), lambda path: replacing_directory(path).__enter__()):
        with pytest.raises(WriteError, match="a component of the path is a file, not a directory"):
            write(tmp_path / "file" / "below")
    with pytest.raises(WriteError, match="it is a directory"):
        write_atomically(tmp_path, "x")


@pytest.mark.parametrize("before", ["nothing", "a directory", "a file"])
def test_a_directory_replaces_another_as_a_whole(tmp_path: Path, before: str) -> None:
    target = tmp_path / "deep" / "model"
    target.parent.mkdir()
    if before == "a directory":
        target.mkdir()
        (target / "old").touch()
    elif before == "a file":
        target.write_text("x")
    with replacing_directory(target) as new:
        (new / "sub").mkdir()
        (new / "sub" / "weights").write_text("w")
        (new / "link").symlink_to("nowhere")
        assert new.parent == target.parent
        assert target.exists() == (before != "nothing")
        assert not target.is_dir() or names(target) == ["old"]
    assert (target / "sub" / "weights").read_text() == "w"
    assert (names(target), names(target.parent)) == (["link", "sub"], ["model"])


def test_files_of_a_directory_can_be_read_as_the_umask_says(tmp_path: Path) -> None:
    """safetensors writes files of mode 0600."""
    old = os.umask(0o027)
    try:
        with replacing_directory(tmp_path / "model") as folder:
            (folder / "below").mkdir()
            save_file({"a": torch.zeros(1)}, folder / "below" / "model.safetensors")
            (folder / "program").touch(0o700)
    finally:
        os.umask(old)
    modes = [(tmp_path / "model" / name).stat().st_mode for name in ("below/model.safetensors", "program")]
    assert list(map(stat.S_IMODE, modes)) == [0o640, 0o740]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (KeyError("in the block"), KeyError, "in the block"),
        (OSError(errno.ENOSPC, "full"), WriteError, "there is no space left"),
        (PermissionError(errno.EACCES, "reading something else", "/elsewhere/file"), PermissionError, "something else"),
        (None, WriteError, "permission denied"),
    ],
    ids=["in the block", "full disk", "of another file", "in the swap"],
)
def test_the_old_directory_stays_when_it_is_not_replaced(tmp_path, monkeypatch, error, kind, message) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").write_text("x")
    real = os.rename

    def rename(source: Path, destination: Path) -> None:
        if error is None and Path(source).suffix == ".tmp":
            raise OSError(errno.EACCES, "no", str(source))
        real(source, destination)

    monkeypatch.setattr(os, "rename", rename)

    def replace() -> None:
        with replacing_directory(tmp_path / "model") as new:
            (new / "new").write_text("y")
            if error is not None:
                raise error

    with pytest.raises(kind, match=message):
        replace()
    assert (names(tmp_path), names(tmp_path / "model")) == (["model"], ["old"])


def test_a_private_file_is_private_before_it_has_a_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    monkeypatch.setattr(os, "fsync", lambda file: modes.append(stat.S_IMODE(os.fstat(file).st_mode)))
    with failing(monkeypatch, os, "fchmod", errno.EPERM):
        write_atomically(tmp_path / "ours", "x", private=True)
    assert modes[0] == stat.S_IMODE((tmp_path / "ours").stat().st_mode) == 0o600


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    for name in (".model.0123456789ab.tmp", "checkpoints/.step-000002.0123456789ab.old", "recorded/.keep.tmp"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".config.yaml.0123456789ab.tmp").write_text("x")
    (tmp_path / "checkpoints" / "step-000001").mkdir()
    remove_temporary(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"checkpoints", "checkpoints/step-000001", "recorded", "recorded/.keep.tmp"}


def test_links_are_removed_and_not_their_targets(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").touch()
    (tmp_path / "run").mkdir()
    for name in (".step.0123456789ab.tmp", "step-1"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "theirs")
    remove_temporary(tmp_path / "run")
    remove_directory(tmp_path / "run" / "step-1")
    assert (names(tmp_path / "run"), names(tmp_path / "theirs")) == ([], ["file"])


# -- errors of the libraries that write --------------------------------------------------------------------------------


def torch_stream(folder: Path) -> None:
    with (folder / "a").open("wb") as file:
        torch.save(torch.zeros(LIMIT), file)


def tokenizer(folder: Path) -> None:
    words = {f"w{number}": number for number in range(9999)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def memory_map(folder: Path) -> None:
    ids = torch.zeros(LIMIT, 1, dtype=torch.int64)
    RewardData.from_lengths(ids, torch.ones(LIMIT, dtype=torch.int64), end_scores=torch.zeros(LIMIT)).save(folder / "a")


WRITERS: dict[str, Callable[[Path], object]] = {
    "memory map": memory_map,
    "safetensors": lambda folder: save_file({"a": torch.zeros(LIMIT)}, folder / "a"),
    "torch file": lambda folder: torch.save(torch.zeros(LIMIT), folder / "a"),
    "torch stream": torch_stream,
    "distributed checkpoint": lambda folder: dcp.save(
        {"a": torch.zeros(LIMIT)}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True
    ),
    "tokenizer": tokenizer,
    "python": lambda folder: (folder / "a").write_bytes(bytes(2 * LIMIT)),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("writer", WRITERS)
def test_a_library_that_runs_out_of_space_is_told_with_the_bytes(tmp_path: Path, writer: str) -> None:
    target = tmp_path / "model"
    target.mkdir()
    with file_limit(), pytest.raises(WriteError) as error, replacing_directory(target) as folder:
        WRITERS[writer](folder)
    assert str(error.value).startswith(f"cannot write {target}")
    assert f"bytes are free, and a file may have {LIMIT:,})" in str(error.value)
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("writer", ["safetensors", "tokenizer", "torch file", "python"])
def test_a_folder_that_is_removed_meanwhile_is_told(tmp_path: Path, writer: str) -> None:
    def replace() -> None:
        with replacing_directory(tmp_path / "model") as folder:
            shutil.rmtree(folder)
            WRITERS[writer](folder)

    with pytest.raises(WriteError, match="model: its directory was removed"):
        replace()


def test_a_temporary_name_is_told_as_the_one_that_it_stands_for(tmp_path: Path) -> None:
    with (
        pytest.raises(WriteError, match=f"cannot write {tmp_path}/step-000004/model: "),
        replacing_directory(tmp_path / "step-000004") as folder,
        replacing_directory(folder / "model"),
    ):
        raise OSError(errno.ENOSPC, "full")


@pytest.mark.parametrize("error", [DataError("ours"), RuntimeError("other"), KeyboardInterrupt()], ids=repr)
def test_errors_that_are_not_the_disks_pass_unchanged(tmp_path: Path, error: BaseException) -> None:
    error.__context__ = None if isinstance(error, RuntimeError) else OSError(errno.ENOSPC, "earlier")
    with pytest.raises(type(error)), writing(tmp_path / "a"):
        raise error


@pytest.mark.parametrize(("total", "wanted", "fits"), [(10_000, 1_000, True), (10_000, 1_001, False), (0, 1_001, True)])
def test_space_is_checked_before_a_long_write(tmp_path, monkeypatch, total, wanted, fits) -> None:
    """A file system that does not say how large it is may have space."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=total, free=1_000))
    message = f"{tmp_path}/deep/model: it takes at least 1,001 bytes, and 1,000 are free"
    with nullcontext() if fits else pytest.raises(WriteError, match=message):
        require_space(tmp_path / "deep" / "model", wanted)


def test_an_appended_file_is_complete_once_there_is_space_again(tmp_path: Path) -> None:
    file = AppendedFile(tmp_path / "new" / "log")
    file.write(b"a" * 90)
    with file_limit(100):
        for _ in range(2):
            with pytest.raises(WriteError, match="log: the file would be larger than allowed"):
                file.write(b"b" * 20)
        assert (tmp_path / "new" / "log").read_bytes() == b"a" * 90 + b"b" * 10
    file.write(b"c")
    file.close()
    assert (tmp_path / "new" / "log").read_bytes() == b"a" * 90 + b"b" * 40 + b"c"


@pytest.mark.parametrize("kind", [JsonlObserver, TensorBoardObserver])
def test_metrics_that_a_full_disk_did_not_take_are_written_later(tmp_path, caplog, kind) -> None:
    quiet = dict.fromkeys(("console", "jsonl", "tensorboard", "curve"), False)
    info = RunInfo(SimpleNamespace(observers=ObserversConfig(samples=0)), tmp_path)
    observers = Observers(ObserversConfig(**quiet), info)
    observers._core.register(kind(), name="mine")
    observers.run_started()
    observers.step_finished(1, {"train/loss": 1.0})
    with file_limit(max(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) + 10):
        for step in (2, 3):
            observers.step_finished(step, {"train/loss": float(step)})
    [message] = caplog.messages
    assert "observer 'mine' failed and will try again; the run continues: cannot write" in message
    observers.step_finished(4, {"train/loss": 4.0})
    observers.close()
    if kind is JsonlObserver:
        steps = [row["train/loss"] for row in read_history(tmp_path / "metrics.jsonl")]
    else:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        [path] = (tmp_path / "tensorboard").iterdir()
        steps = [float(event.step) for event in EventFileLoader(str(path)).Load() if event.step]
    assert steps == [1.0, 2.0, 3.0, 4.0]

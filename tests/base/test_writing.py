"""Errors of the disk, from every library that writes for us, are one error with the path and the bytes."""

from __future__ import annotations

import errno
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlframework.base.errors import DataError, WriteError
from rlframework.base.files import AppendedFile, remove_temporary, replacing_directory, require_space, writing
from rlframework.config.sections import ObserversConfig
from rlframework.observers.dispatch import Observers
from rlframework.observers.jsonl import JsonlObserver, read_history
from rlframework.plugins.hookspec import RunInfo
from rlframework_report.services import TensorBoardObserver

LIMIT = 50_000


@contextmanager
def file_limit(size: int = LIMIT) -> Iterator[None]:
    """Limit files to `size` bytes: writes beyond fail with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def safetensors(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(LIMIT)}, folder / "a")


def torch_file(folder: Path) -> None:
    import torch

    torch.save(torch.zeros(LIMIT), folder / "a")


def torch_stream(folder: Path) -> None:
    import torch

    with (folder / "a").open("wb") as file:
        torch.save(torch.zeros(LIMIT), file)


def torch_distributed_checkpoint(folder: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.zeros(LIMIT)}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"w{number}": number for number in range(9999)}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )


def python(folder: Path) -> None:
    (folder / "a").write_bytes(bytes(2 * LIMIT))


def memory_map(folder: Path) -> None:
    import torch

    from rlframework_preferences.reward_data import RewardData

    ids = torch.zeros(LIMIT, 1, dtype=torch.int64)
    RewardData.from_lengths(ids, torch.ones(LIMIT, dtype=torch.int64), end_scores=torch.zeros(LIMIT)).save(folder / "a")


WRITERS = (memory_map, safetensors, torch_file, torch_stream, torch_distributed_checkpoint, tokenizer, python)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("write", WRITERS)
def test_each_library_that_runs_out_of_space_is_told_with_the_bytes(tmp_path: Path, write: Callable[..., None]) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("x")
    with file_limit(), pytest.raises(WriteError) as error, replacing_directory(target) as folder:
        write(folder)
    assert str(error.value).startswith(f"cannot write {target}")
    assert f"bytes are free, and a file may have {LIMIT:,})" in str(error.value)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "old"]


@pytest.mark.parametrize("write", [safetensors, tokenizer, torch_file, python])
def test_a_folder_that_is_removed_meanwhile_is_told(tmp_path: Path, write: Callable[..., None]) -> None:
    def removed(folder: Path) -> None:
        shutil.rmtree(folder)
        write(folder)

    with (
        pytest.raises(WriteError, match="model: its directory was removed"),
        replacing_directory(tmp_path / "model") as at,
    ):
        removed(at)


def test_a_temporary_name_is_told_as_the_one_that_it_stands_for(tmp_path: Path) -> None:
    with (
        pytest.raises(WriteError, match=f"cannot write {tmp_path}/step-000004/model: "),
        replacing_directory(tmp_path / "step-000004") as folder,
        replacing_directory(folder / "model"),
    ):
        raise OSError(errno.ENOSPC, "full")


def test_errors_that_are_not_the_disks_pass_unchanged(tmp_path: Path) -> None:
    for error in (DataError("ours"), RuntimeError("other"), KeyboardInterrupt()):
        error.__context__ = OSError(errno.ENOSPC, "earlier") if not isinstance(error, RuntimeError) else None
        with pytest.raises(type(error)), writing(tmp_path / "a"):
            raise error


def test_space_is_checked_before_a_long_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(total=10_000, free=1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    require_space(tmp_path / "deep" / "model", 1_000)
    with pytest.raises(WriteError, match=f"{tmp_path}/deep/model: it takes at least 1,001 bytes, and 1,000 are free"):
        require_space(tmp_path / "deep" / "model", 1_001)
    free.total = 0  # a file system that does not say
    require_space(tmp_path / "deep" / "model", 1_001)


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
    size = max(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    with file_limit(size + 10):
        for step in (2, 3):
            observers.step_finished(step, {"train/loss": float(step)})
    [message] = caplog.messages
    assert "observer 'mine' failed and will try again; the run continues: cannot write" in message
    observers.step_finished(4, {"train/loss": 4.0})
    observers.close()
    if kind is JsonlObserver:
        losses = [row["train/loss"] for row in read_history(tmp_path / "metrics.jsonl")]
    else:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        [path] = (tmp_path / "tensorboard").iterdir()
        events = [event for event in EventFileLoader(str(path)).Load() if event.step]
        losses = [float(event.step) for event in events]
    assert losses == [1.0, 2.0, 3.0, 4.0]


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    for name in (".model.0123456789ab.tmp", "checkpoints/.step-000002.0123456789ab.old", "recorded/.keep.tmp"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".config.yaml.0123456789ab.tmp").write_text("x")
    (tmp_path / "checkpoints" / "step-000001").mkdir()
    remove_temporary(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"checkpoints", "checkpoints/step-000001", "recorded", "recorded/.keep.tmp"}

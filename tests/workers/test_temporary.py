"""Workers have a TMPDIR of their own, and nothing is left of it when they have ended."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlframework.workers.temporary import PREFIX, TemporaryFolder

OWNER = """
import sys, time
from rlframework.workers.temporary import TemporaryFolder
print(TemporaryFolder(sys.argv[1]).path, flush=True)
time.sleep(60)
"""


def test_the_folder_is_this_users_and_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    folder = TemporaryFolder(str(tmp_path))
    assert folder.path.stat().st_mode & 0o077 == 0
    assert folder.environment({"TMPDIR": "/other", "A": "1"}) | {"TMPDIR": str(folder.path), "A": "1"} == (
        folder.environment({"TMPDIR": "/other", "A": "1"})
    )
    (folder.path / "left" / "below").mkdir(parents=True)
    folder.remove()
    assert not list(tmp_path.iterdir())


def test_torchs_folder_for_compiled_kernels_goes_if_it_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch creates it when it is imported; kernels stay for later runs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folder = TemporaryFolder(str(tmp_path))
    kernels = Path(folder.environment({})["TORCHINDUCTOR_CACHE_DIR"])
    for names in ((), ("kernel",)):
        kernels.mkdir()
        for name in names:
            (kernels / name).touch()
        folder.remove()
        assert kernels.exists() == bool(names)


def test_the_folder_of_a_killed_process_goes_at_the_next_start(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        (theirs / "file").write_text("x")
        mine = tmp_path / f"{PREFIX}somefile"
        mine.write_text("a file")
        TemporaryFolder(str(tmp_path)).remove()
        assert (theirs / "file").exists()  # its owner lives
        owner.kill()
    TemporaryFolder(str(tmp_path)).remove()
    assert [path.name for path in tmp_path.iterdir()] == [mine.name]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("rlframework-main", 0o700),
        ("rlframework-checkout", 0o700),
        (f"{PREFIX}old", 0o700),
        (f"{PREFIX}notebook", 0o755),
    ],
)
def test_a_folder_of_the_user_with_a_similar_name_stays(tmp_path: Path, name: str, mode: int) -> None:
    (work := tmp_path / name).mkdir(mode)
    (work / "file").write_text("x")
    os.utime(work, (0, 0))
    TemporaryFolder(str(tmp_path)).remove()
    assert (work / "file").exists()


@pytest.mark.slow
def test_folders_made_at_the_same_time_do_not_take_each_other(tmp_path: Path) -> None:
    def make(_: int) -> TemporaryFolder:
        return TemporaryFolder(str(tmp_path))

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(make, range(200)))
    assert all(folder.path.exists() for folder in folders)
    for folder in folders:
        folder.remove()
    assert not list(tmp_path.iterdir())


def listed(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*")}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dtensor", "deepspeed", "megatron"])
def test_a_run_leaves_nothing_besides_its_folder(run_config, tmp_path, monkeypatch, backend):
    from rlframework.plugins.configure import config_yaml

    keys = [f"policy.backend={backend}", "worker_group={name: processes, num_workers: 2}", "plugins=[]"]
    config = run_config("sft", *keys, "checkpoints.every=1", f"output_dir={tmp_path / 'run'}")
    (tmp_path / "run.yaml").write_text(config_yaml(config))
    short = Path(tempfile.mkdtemp(prefix="run-", dir="/tmp"))  # sockets have paths of 107 bytes
    places = [tmp_path / "home", short, tmp_path / "cwd"]
    for place in (places[0], places[2]):
        place.mkdir()
    monkeypatch.setenv("HOME", str(places[0]))
    monkeypatch.setenv("TMPDIR", str(places[1]))
    shared, started = listed(Path("/dev/shm")), time.time()
    command = [sys.executable, "-m", "rlframework.cli", "train", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, cwd=places[2], capture_output=True, text=True, timeout=110.0)
    assert done.returncode == 0, done.stderr
    left = [str(path) for path in listed(*places) if not path.is_dir() or not any(path.iterdir())]
    short.rmdir()
    kept = "matplotlib", "mlflow"  # what libraries keep for the user: a cache of fonts, an answer about telemetry
    assert not [path for path in left if "/home/" not in path or not any(name in path for name in kept)]
    assert not {path for path in listed(Path("/dev/shm")) - shared if path.stat().st_mtime > started}

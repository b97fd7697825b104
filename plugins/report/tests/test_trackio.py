"""Trackio: a stub with the signatures of 0.43, and the real package without a network if it is installed."""

from __future__ import annotations

import importlib.util
import sys
import types
from contextvars import ContextVar
from pathlib import Path

import pytest
from service_runs import info, tell

from rlframework.config.sections import TrackioConfig
from rlframework.observers.run_environment import write_environment


class StubTrackio(types.ModuleType):
    """Keeps runs by their name, as Trackio does; it prints, and finishes the run that is active in the context."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.active: ContextVar[StubRun | None] = ContextVar("active", default=None)
        self.runs: dict[str, StubRun] = {}
        self.asked: list[dict] = []

    def Table(self, columns=None, data=None, dataframe=None, rows=None):  # noqa: N802
        return ("table", columns, data)

    def init(
        self, project, name=None, group=None, space_id=None, server_url=None, dataset_id=None, bucket_id=None,
        config=None, resume="never", settings=None, private=None, embed=True, auto_log_gpu=None, gpu_log_interval=10.0,
        auto_log_cpu=None, cpu_log_interval=10.0, webhook_url=None, webhook_min_level=None,
    ):  # fmt: skip
        if (active := self.active.get()) is not None:
            active.finish()
        print("* Trackio project initialized")
        self.asked.append({"project": project, "space_id": space_id, "private": private, "config": config})
        assert resume == "allow"
        run = self.runs.setdefault(name, StubRun(name))
        self.active.set(run)
        return run


class StubRun:
    def __init__(self, name: str) -> None:
        self.name, self.logged, self.finished, self.url = name, [], 0, None

    def log(self, metrics, step=None):
        self.logged.append((step, metrics))

    def finish(self):
        print("* Run finished.")
        self.finished += 1


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubTrackio:
    module = StubTrackio()
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


@pytest.mark.parametrize(
    ("error", "state"), [(None, "finished"), (ValueError, "failed"), (KeyboardInterrupt, "killed")]
)
def test_the_data_sent_to_trackio(tmp_path: Path, stub, error, state, capsys) -> None:
    run = info(tmp_path / "run7", trackio=TrackioConfig(project="p", space_id="me/runs"))
    own = write_environment(run.output_dir)["run_id"]
    tell(run, error=error)
    [asked] = stub.asked
    config = asked.pop("config")
    assert asked == {"project": "p", "space_id": "me/runs", "private": True}
    assert config["policy"]["optimizer"]["lr"] == 1e-6
    assert config["environment_of_run"]["run_id"] == own
    [seen] = stub.runs.values()
    columns = ["step", "kind", "prompt", "completion", "reward"]
    [(first, metrics), *others] = seen.logged
    assert (first, metrics["train/loss"]) == (1, 0.5)
    assert metrics["samples"] == ("table", columns, [[1, "train", "1+1=", "2", 1.0]])
    assert others == [
        (2, {"train/loss": 0.25, "validation/pass@4": 0.5}),
        (2, {"checkpoint/path": str(tmp_path / "run7" / "model")}),
        (2, {"state": state}),
    ]
    assert seen.finished == 1
    assert capsys.readouterr().out == ""  # what Trackio prints is not the output of the command


def test_a_resumed_run_is_the_same_and_another_in_a_folder_of_that_name_is_not(tmp_path: Path, stub) -> None:
    run = info(tmp_path / "a" / "run", trackio=TrackioConfig())
    own = write_environment(run.output_dir)["run_id"]
    tell(run, error=KeyboardInterrupt)
    write_environment(run.output_dir)
    tell(run)
    assert list(stub.runs) == [f"run-{own[:8]}"]
    other = info(tmp_path / "b" / "run", trackio=TrackioConfig(run_name="mine"))
    second = write_environment(other.output_dir)["run_id"]
    tell(other)
    assert list(stub.runs) == [f"run-{own[:8]}", f"mine-{second[:8]}"]


def test_the_program_s_own_run_stays_active(tmp_path: Path, stub) -> None:
    own = stub.init("own", "own", resume="allow")
    tell(info(tmp_path, trackio=TrackioConfig()))
    assert stub.active.get() is own
    assert own.finished == 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_stores_and_resumes_the_run(tmp_path: Path, monkeypatch, caplog) -> None:
    from trackio import sqlite_storage

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("TRACKIO_DIR", "MEDIA_DIR"):  # read from the environment when trackio is imported
        for module in [module for key, module in sys.modules.items() if key.startswith("trackio")]:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, tmp_path / "trackio" / ("media" if name == "MEDIA_DIR" else ""))
    storage = sqlite_storage.SQLiteStorage
    run = info(tmp_path / "run", trackio=TrackioConfig(project="p"))
    own = write_environment(run.output_dir)["run_id"]
    tell(run, error=KeyboardInterrupt)
    tell(run)
    assert "failed and is disabled" not in caplog.text
    [record] = storage.get_run_records("p")
    assert record["name"] == f"run-{own[:8]}"
    logs = storage.get_logs("p", record["name"])
    assert [(row["step"], row["train/loss"]) for row in logs if "train/loss" in row] == [(1, 0.5), (2, 0.25)] * 2
    assert [row["state"] for row in logs if "state" in row] == ["killed", "finished"]
    table = next(row["samples"]["_value"] for row in logs if "samples" in row)
    assert table == [{"step": 1, "kind": "train", "prompt": "1+1=", "completion": "2", "reward": 1.0}]
    assert storage.get_run_config("p", record["name"])["policy"]["optimizer"]["lr"] == 1e-6

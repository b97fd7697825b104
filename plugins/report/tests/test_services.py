"""W&B, MLflow and Trackio: doubles, and offline the real packages if they are installed; and TensorBoard."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import types
import warnings
from contextvars import ContextVar
from pathlib import Path

import pytest
from service_runs import info, tell

from rlframework.base.errors import ConfigError
from rlframework.config.sections import MlflowConfig, ObserversConfig, TrackioConfig, WandbConfig
from rlframework.observers.run_environment import write_environment
from rlframework.plugins.hookspec import RunInfo
from rlframework_report import services
from rlframework_report.services import TensorBoardObserver, problems_of_services

# -- before the run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_package_is_an_error_before_the_run_and_names_the_extra(name, monkeypatch):
    monkeypatch.setattr(services, "_installed", lambda module: module != name)
    assert problems_of_services(ObserversConfig()) == []
    [problem] = problems_of_services(ObserversConfig(**{name: {}}))
    assert f"pip install 'rlframework-core[{name}]', or set observers.{name}=false" in problem


def test_the_folder_left_by_a_wandb_run_is_not_taken_for_the_package(tmp_path, monkeypatch):
    (tmp_path / "a_service_for_this_test").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    names = ("a_service_for_this_test", "no_such_service_for_this_test", "pydantic")
    assert [services._installed(name) for name in names] == [False, False, True]


def test_a_password_in_the_address_is_rejected_and_not_repeated(monkeypatch):
    monkeypatch.setattr(services, "_installed", lambda module: True)
    [problem] = problems_of_services(ObserversConfig(mlflow=MlflowConfig(tracking_uri="https://me:hush@host/x")))
    assert "MLFLOW_TRACKING_PASSWORD" in problem
    assert "hush" not in problem
    assert problems_of_services(ObserversConfig(mlflow=MlflowConfig(tracking_uri="https://host/x"))) == []


def test_the_run_is_rejected_before_anything_is_written(tmp_path, monkeypatch):
    from rlframework.runner.launch import run

    monkeypatch.setattr(services, "_installed", lambda module: False)
    with pytest.raises(ConfigError, match=r"observers\.wandb is set"):
        run(info(tmp_path / "out", wandb={}).config)
    assert not (tmp_path / "out").exists()


# -- a package that fails, and one that records -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_service_that_raises_is_reported_once_and_the_run_continues(name, tmp_path, monkeypatch, caplog):
    def fail(*arguments, **named):
        raise RuntimeError("no route to https://me:hush@host")

    module = types.ModuleType(name)
    module.init = module.Settings = module.MlflowClient = fail
    monkeypatch.setitem(sys.modules, name, module)
    tell(info(tmp_path, **{name: {}}))
    [told] = caplog.messages
    assert told.startswith(f"observer '{name}' failed and is disabled; the run continues: RuntimeError: no route to ")
    assert "hush" not in told


class FakeWandb(types.ModuleType):
    """Records the data sent to W&B, whose own file cannot be read back with its public API."""

    def __init__(self):
        super().__init__("wandb")
        self.logged, self.summary, self.url, self.dir, self.code = [], {}, None, "here", None

    def init(self, **named):
        self.named = named
        return self

    def Settings(self, **named):  # noqa: N802
        return named

    def Table(self, columns, data):  # noqa: N802
        return ("table", columns, data)

    def define_metric(self, name, step_metric=None):
        pass

    def log(self, values):
        self.logged.append(values)

    def finish(self, exit_code):
        self.code = exit_code


@pytest.mark.parametrize(
    ("error", "state", "code"), [(None, "finished", 0), (ValueError, "failed", 1), (KeyboardInterrupt, "killed", 1)]
)
def test_the_data_sent_to_wandb(tmp_path, monkeypatch, error, state, code):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    own = write_environment(tmp_path / "run7")["run_id"]
    tell(info(tmp_path / "run7", wandb=WandbConfig(project="p", tags=("a", "b"), mode="offline")), error=error)
    assert {name: fake.named[name] for name in ("project", "name", "tags", "mode", "id")} == {
        "project": "p", "name": "run7", "tags": ["a", "b"], "mode": "offline", "id": own,
    }  # fmt: skip
    assert fake.named["config"]["policy"]["optimizer"]["lr"] == 1e-6
    assert fake.named["config"]["environment_of_run"]["run_id"] == own
    assert [row["step"] for row in fake.logged] == [1, 2]
    assert fake.logged[0]["train/loss"] == 0.5
    columns = ["step", "kind", "prompt", "completion", "reward"]
    assert fake.logged[0]["samples"] == ("table", columns, [[1, "train", "1+1=", "2", 1.0]])
    assert "samples" not in fake.logged[1]
    path = str(tmp_path / "run7" / "model")
    assert fake.summary == {"checkpoint/step": 2, "checkpoint/path": path, "state": state}
    assert fake.code == code


# -- the real packages ------------------------------------------------------------------------------------------------


needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
needs_mlflow = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mlflow", "sqlalchemy", "alembic")),
    reason="mlflow is not installed",
)


@pytest.mark.slow
@needs_wandb
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_wandb_offline_stores_the_run_in_its_directory(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    run = info(tmp_path / "run", wandb=WandbConfig(mode="offline"))
    own = write_environment(run.output_dir)["run_id"]
    tell(run)
    assert "failed and is disabled" not in caplog.text
    [file] = (run.output_dir / "wandb").glob(f"offline-run-*-{own}/run-{own}.wandb")
    until = time.monotonic() + 60
    while b"train/loss" not in file.read_bytes() and time.monotonic() < until:  # wandb's own process writes it
        time.sleep(0.1)
    assert b"train/loss" in file.read_bytes()
    [table] = (run.output_dir / "wandb").rglob("*.table.json")
    assert json.loads(table.read_text())["data"] == [[1, "train", "1+1=", "2", 1.0]]
    everything = b"".join(path.read_bytes() for path in run.output_dir.rglob("*") if path.is_file())
    assert b"0123456789" * 4 not in everything


@pytest.mark.slow
@needs_mlflow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_mlflow_stores_and_resumes_the_run(tmp_path, monkeypatch, caplog):
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)  # artifacts go to the working directory where there is no server
    uri = f"sqlite:///{tmp_path}/runs.db"
    run = info(tmp_path / "run", mlflow=MlflowConfig(tracking_uri=uri, experiment="e", tags={"who": "test"}))
    own = write_environment(run.output_dir)["run_id"]
    tell(run, error=KeyboardInterrupt)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("e").experiment_id
    [seen] = client.search_runs([experiment])
    assert seen.info.status == "KILLED"
    assert seen.info.run_name == "run"
    assert seen.data.params["policy.optimizer.lr"] == "1e-06"
    assert seen.data.tags["who"] == "test"
    assert seen.data.tags["rlframework.run_id"] == own
    assert seen.data.tags["checkpoint.path"] == str(run.output_dir / "model")
    history = client.get_metric_history(seen.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.25)]
    assert seen.data.metrics["validation/pass_4"] == 0.5  # MLflow allows no @
    folder = Path(seen.info.artifact_uri.removeprefix("file://"))
    table = json.loads((folder / "samples" / "step-000001.json").read_text())
    assert table["data"] == [[1, "train", "1+1=", "2", 1.0]]
    tell(run)  # the same directory: the same run
    [seen] = client.search_runs([experiment])
    assert seen.info.status == "FINISHED"
    assert "failed and is disabled" not in caplog.text


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def scalars(path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the reader, which is not ours
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    return EventAccumulator(str(path / "tensorboard")).Reload()


def test_a_resumed_run_replaces_repeated_steps(tmp_path):
    for steps, value in (((1, 2, 3, 4), 0.5), ((3, 4, 5), 0.25)):
        observer = TensorBoardObserver()
        observer.rlframework_run_started(RunInfo(None, tmp_path))
        for step in steps:
            observer.rlframework_step_finished(step, {"train/loss": value, "train/reward": 0.25})
        observer.close()
    events = scalars(tmp_path)
    seen = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert seen == [(1, 0.5), (2, 0.5), (3, 0.25), (4, 0.25), (5, 0.25)]
    assert {event.value for event in events.Scalars("train/reward")} == {0.25}


def test_close_without_a_start_is_harmless():
    TensorBoardObserver().close()


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
    other = stub.init("other", "other", resume="allow")  # a run of the program's own, which stays active
    stub.asked.clear()
    capsys.readouterr()
    run = info(tmp_path / "run7", trackio=TrackioConfig(project="p", space_id="me/runs"))
    own = write_environment(run.output_dir)["run_id"]
    tell(run, error=error)
    [asked] = stub.asked
    config = asked.pop("config")
    assert asked == {"project": "p", "space_id": "me/runs", "private": True}
    assert config["policy"]["optimizer"]["lr"] == 1e-6
    assert config["environment_of_run"]["run_id"] == own
    assert (stub.active.get(), other.finished) == (other, 0)
    _, seen = stub.runs.values()
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

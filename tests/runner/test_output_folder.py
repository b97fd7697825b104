"""Runs in a folder that is not empty: which they reuse, which they replace, and what they never touch."""

from __future__ import annotations

from pathlib import Path

import pytest
from probe_runs import call, rows_of

from rlframework import run
from rlframework.algorithms.checkpoints import Checkpoints, checkpoints_in
from rlframework.base.errors import ConfigError, UserError
from rlframework.base.files import exclusive_directory
from rlframework.observers.run_environment import read_environment
from rlframework.plugins.configure import config_yaml
from rlframework.policy.client import Policy
from rlframework.runner.output_folder import check_output_dir, clear, read_contents
from rlframework_tools.estimates.printing import estimate_run

pytestmark = pytest.mark.slow


class Failure(Exception):
    """A failure that these tests cause."""


def failing(*args, **kwargs):
    raise Failure


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in rows_of(folder)]


@pytest.fixture
def finished(run_config, tmp_path):
    """The configuration of a run, and its folder, after the run."""
    config = run_config("sft", "algorithm.num_steps=2", "observers.tensorboard=true")
    run(config)
    return config, tmp_path / "run"


@pytest.mark.parametrize("target", ["algorithms.loop.StepLoop._begin", "policy.client.Policy.train"])
def test_a_run_that_failed_in_its_first_step_can_be_started_again(run_config, tmp_path, monkeypatch, target):
    config = run_config("sft", "algorithm.num_steps=2", "observers.tensorboard=true")
    with monkeypatch.context() as patch:
        patch.setattr(f"rlframework.{target}", failing)
        with pytest.raises(Failure):
            run(config)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {".lock", "config.yaml", "environment.json", "metrics.jsonl", "timeline.jsonl"} <= names
    before = read_environment(tmp_path / "run")["run_id"]
    found = read_contents(tmp_path / "run")
    assert (found.results, found.foreign) == ((), ())
    run(config)
    assert steps(tmp_path / "run") == [0, 1, 2]
    assert read_environment(tmp_path / "run")["run_id"] != before
    assert "earlier" not in read_environment(tmp_path / "run")
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1


def test_a_run_that_failed_in_its_second_step_is_kept(run_config, tmp_path, monkeypatch):
    config = run_config("sft", "algorithm.num_steps=2", "algorithm.validation.at_start=false")
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "after_step", failing)
        with pytest.raises(Failure):
            run(config)
    before = contents(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"it holds a run \(metrics\.jsonl, timeline\.jsonl\)") as error:
        run(config)
    assert "--resume" not in str(error.value)  # it has no checkpoint
    assert "Either replace it (--overwrite; in Python, overwrite=True), or take another output_dir" in str(error.value)
    assert contents(tmp_path / "run") == before


def test_a_finished_run_is_replaced_only_with_overwrite(finished, caplog):
    config, folder = finished
    before = contents(folder)
    with pytest.raises(
        ConfigError,
        match=r"it holds a run \(.*model.*\)\. Either replace it \(--overwrite; in Python, overwrite=True\)",
    ):
        run(config)
    assert contents(folder) == before
    (folder / "checkpoints" / "step-000009").mkdir(parents=True)
    (folder / "checkpoints" / "step-000009" / "run.json").touch()
    run(config, overwrite=True)
    assert f"overwriting {folder}: deleting checkpoints, config.yaml, " in caplog.text
    assert steps(folder) == [0, 1, 2]
    assert not checkpoints_in(folder)
    assert contents(folder)["environment.json"] != before["environment.json"]


def test_the_command_line_names_the_ways_out(finished, tmp_path, capsys):
    config, folder = finished
    file = tmp_path / "run.yaml"
    file.write_text(config_yaml(config))
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (folder / "checkpoints" / "step-000001" / "run.json").touch()
    assert call("train", file) == 2
    error = capsys.readouterr().err
    assert f"Either resume it (rlframework train --resume {folder}), replace it (--overwrite; " in error
    assert call("train", "--resume", folder, "--overwrite") == 2
    assert "--resume continues a run and --overwrite deletes it; give one of them" in capsys.readouterr().err
    assert call("train", file, "--overwrite") == 0
    assert not checkpoints_in(folder)


def test_a_dry_run_warns_of_the_folder_and_succeeds(finished, tmp_path, capsys, caplog):
    config, folder = finished
    before = contents(folder)
    assert any("it holds a run" in line for line in estimate_run(config).warnings())
    assert not any("output_dir" in line for line in estimate_run(config, overwrite=True).warnings())
    file = tmp_path / "run.yaml"
    file.write_text(config_yaml(config))
    capsys.readouterr()
    assert call("train", file, "--dry-run") == 0
    captured = capsys.readouterr()
    assert caplog.messages[-1].startswith("warning: output_dir=")
    assert captured.out.endswith("dry run complete: nothing was started or written\n")
    assert contents(folder) == before


def test_what_a_report_wrote_is_replaced_with_its_run(finished):
    config, folder = finished
    assert call("report", folder) == 0
    assert {"report.html", "report-figures"} <= set(read_contents(folder).results)
    check_output_dir(config, overwrite=True)
    clear(folder)
    assert [path.name for path in folder.iterdir()] == [".lock"]


FOREIGN = [
    "notes.txt",
    "report-figures/thesis.tex",
    "data/rows.jsonl",
    "tensorboard/notes.txt",
    "model/thesis.tex",
    "checkpoints/notes/a.txt",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_that_no_run_wrote_is_named_and_stays(finished, name):
    config, folder = finished
    (folder / "curve.png").touch()  # as of a run that draws it
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("precious")
    before = contents(folder)
    with pytest.raises(ConfigError) as error:
        run(config, overwrite=True)
    assert f"files that no run wrote ({name})" in str(error.value)
    assert "it would delete config.yaml, curve.png, environment.json" in str(error.value)
    assert contents(folder) == before


def test_a_link_is_foreign_and_not_followed(finished, tmp_path):
    config, folder = finished
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("precious")
    (folder / "recorded").symlink_to(tmp_path / "data")
    with pytest.raises(ConfigError, match=r"files that no run wrote \(recorded\)"):
        run(config, overwrite=True)
    assert (tmp_path / "data" / "rows.jsonl").read_text() == "precious"


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_with_the_names_of_a_run_are_foreign_without_its_lock_or_id(run_config, tmp_path, overwrite):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("precious: true\n")
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"files that no run wrote \(config\.yaml, metrics\.jsonl\)"):
        run(run_config("sft"), overwrite=overwrite)
    assert (tmp_path / "run" / "config.yaml").read_text() == "precious: true\n"
    assert not (tmp_path / "run" / ".lock").exists()


def test_the_model_that_a_run_starts_from_is_not_overwritten(finished, run_config):
    _, folder = finished
    config = run_config("sft", f"policy.model_name={folder}/model")
    with pytest.raises(
        ConfigError, match=r"policy\.model_name='.*model' is in output_dir=.*--overwrite would delete it"
    ):
        check_output_dir(config, overwrite=True)


def test_nothing_is_deleted_when_the_input_is_wrong(finished, run_config):
    _, folder = finished
    before = contents(folder)
    with pytest.raises(UserError, match=r"policy\.batching\.tokens=5 is the most"):
        run(run_config("sft", "policy.batching.tokens=5"), overwrite=True)
    assert contents(folder) == before


def test_the_folder_of_another_process_is_not_overwritten(finished):
    config, folder = finished
    before = contents(folder)
    with exclusive_directory(folder), pytest.raises(UserError, match="another process is running in"):
        run(config, overwrite=True)
    assert contents(folder) == before


def test_results_that_appear_while_workers_start_are_kept(finished, run_config, tmp_path, monkeypatch):
    """Another process may train in the folder between the check and the lock."""
    config = run_config("sft", f"output_dir={tmp_path}/late")
    start = Policy.__init__

    def slow(self, *args, **kwargs):
        (tmp_path / "run").rename(tmp_path / "late")
        start(self, *args, **kwargs)

    monkeypatch.setattr(Policy, "__init__", slow)
    with pytest.raises(ConfigError, match="it holds a run"):
        run(config)
    assert steps(tmp_path / "late") == [0, 1, 2]

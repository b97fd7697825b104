"""A run whose checkpoints are uploaded resumes on a machine that has none of its files, bit for bit."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from probe_runs import assert_same_weights, call, numbers_of, refused

from rlframework import run
from rlframework.algorithms.checkpoints import checkpoints_in
from rlframework.base.errors import ConfigError
from rlframework.plugins.configure import config_yaml
from rlframework_storage.remote_folder import RemoteFolder, StorageError
from rlframework_storage.transfer import complete_checkpoints

pytestmark = pytest.mark.slow


@pytest.fixture
def options(tmp_path: Path):
    """`options("whole", ...)`: overrides for a run of 4 steps, with checkpoints every 2, all uploaded."""

    def make(name: str, *more: str) -> list[str]:
        upload = f"checkpoints={{every: 2, upload: 'file://{tmp_path}/far'}}"
        steps = ["algorithm.num_steps=4", "algorithm.validation={at_end: false}"]
        return [f"output_dir={tmp_path / name}", *steps, upload, *more]

    return make


RESUME = "checkpoints.resume_uploaded=true"


S3 = "s3://bucket/runs/7"


@pytest.mark.xdist_group("s3")
@pytest.mark.parametrize("where", ["s3", pytest.param("file", marks=pytest.mark.thorough)])
def test_an_empty_machine_resumes_with_the_same_numbers(run_config, tmp_path, options, where, request):
    if where == "s3":
        request.getfixturevalue("s3")
    url = S3 if where == "s3" else f"file://{tmp_path}/far"
    more = (f"checkpoints.upload={url}", "checkpoints.keep_last=1", RESUME)
    run(run_config("sft", *options("whole", "checkpoints.upload=null")))
    run(run_config("sft", *options("first", "algorithm.num_steps=2", "policy.scheduler.total_steps=4", *more)))
    assert list(complete_checkpoints(RemoteFolder(url))) == ["step-000002"]
    shutil.rmtree(tmp_path / "first")
    run(run_config("sft", *options("second", *more)))
    whole, second = numbers_of(tmp_path / "whole"), numbers_of(tmp_path / "second")
    assert {step: whole[step] for step in (3, 4)} == second
    assert_same_weights(tmp_path / "whole", tmp_path / "second")
    remote = RemoteFolder(url)
    assert list(complete_checkpoints(remote)) == ["step-000004"]
    assert {name.partition("/")[0] for name in remote.sizes()} == {"step-000004"}


@pytest.mark.xdist_group("s3")
def test_storage_that_cannot_be_used_is_an_error_before_the_run_begins(run_config, tmp_path, options, s3, monkeypatch):
    """Also one that seems to be empty, where a run to resume would start from the beginning."""
    for more in ((), (RESUME,)):
        config = run_config("sft", *options("run", "checkpoints.upload=s3://buckte/run", *more))
        error = refused(config, StorageError)
        assert (
            "cannot write s3://buckte/run/write-test: FileNotFoundError: The specified bucket does not exist" in error
        )
        assert "The bucket must exist, and the credentials must allow" in error
    config = run_config("sft", *options("run", f"checkpoints.upload={S3}"))
    s3.check_credentials()
    assert "cannot list s3://bucket/runs/7/: PermissionError: The AWS Access Key" in refused(config, StorageError)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    assert "EndpointConnectionError: Could not connect to the endpoint" in refused(config, StorageError)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "NoCredentialsError: Unable to locate credentials" in refused(config, StorageError)


def test_a_new_run_does_not_mix_its_checkpoints_with_those_of_another(run_config, tmp_path, options):
    run(run_config("sft", *options("first")))
    with pytest.raises(ConfigError, match=r"holds checkpoints of another run \(step-000002, step-000004\)\. Resume"):
        run(run_config("sft", *options("second")))
    assert not (tmp_path / "second").exists()


def test_an_upload_that_fails_at_the_end_is_an_error(run_config, tmp_path, options, monkeypatch, capsys):
    """By the command line, whose exit code tells a scheduler of jobs that the checkpoint is not there."""
    monkeypatch.setattr(
        "rlframework_storage.uploads.Uploads.__init__.__kwdefaults__", {"first_wait": 0.0, "attempts": 2}
    )

    def fail(*_: object) -> None:
        raise StorageError("cannot write x: the bucket is gone")

    monkeypatch.setattr(RemoteFolder, "send", fail)
    (tmp_path / "run.yaml").write_text(config_yaml(run_config("sft", *options("run"))))
    assert call("train", tmp_path / "run.yaml") == 1
    error = capsys.readouterr().err
    assert re.search(r"^error: .*step-000004 was not uploaded to .* in 2 attempt.*the bucket is gone", error, re.M)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == ["step-000002", "step-000004"]

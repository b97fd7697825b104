"""Uploads in the background: order, retries, failures, and which are kept."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from rlframework.algorithms.checkpoints import kept_checkpoints
from rlframework.base.errors import RunInterrupted, RunTerminated
from rlframework.config.sections import CheckpointsConfig
from rlframework_storage.remote_folder import StorageError
from rlframework_storage.transfer import complete_checkpoints
from rlframework_storage.uploads import Uploads


@pytest.fixture
def make_uploads(remote):
    def make(**settings: object) -> Uploads:
        keep = partial(kept_checkpoints, config=CheckpointsConfig(**settings))
        return Uploads(remote, keep, first_wait=0.01, attempts=3)

    return make


@pytest.fixture
def held(files, monkeypatch):
    """Copies wait until this event is set; `held.begun` is set when the first one waits."""
    event, put = threading.Event(), files.put_file
    event.begun = threading.Event()

    def wait(*args: str) -> None:
        event.begun.set()
        assert event.wait(60)
        put(*args)

    monkeypatch.setattr(files, "put_file", wait)
    return event


def test_training_goes_on_and_the_newest_that_waits_replaces_the_others(make_uploads, remote, make_checkpoint, held):
    uploads, paths = make_uploads(keep_last=9), [make_checkpoint(step) for step in (1, 2, 3)]
    uploads.add(paths[0])
    assert held.begun.wait(60)
    uploads.add(paths[1])
    uploads.add(paths[2])
    assert uploads.in_use() == {paths[0], paths[2]}
    assert uploads.pop_metrics() == {}
    held.set()
    uploads.finish()
    assert list(complete_checkpoints(remote)) == ["step-000001", "step-000003"]
    assert uploads.in_use() == set()
    metrics = uploads.pop_metrics()
    assert metrics["checkpoint/upload_bytes"] == 120
    assert metrics["checkpoint/upload_seconds"] > 0
    assert uploads.pop_metrics() == {}


def test_a_failed_upload_is_tried_again_and_continues(
    make_uploads, files, remote, make_checkpoint, monkeypatch, caplog
):
    files.budget = 25
    put = files.put_file

    def recover(*args: str) -> None:
        if files.failures:
            files.budget = None
        put(*args)

    monkeypatch.setattr(files, "put_file", recover)
    uploads = make_uploads()
    uploads.add(make_checkpoint(1))
    uploads.finish()
    assert list(complete_checkpoints(remote)) == ["step-000001"]
    assert files.sent == ["000001/model/weights", "000001/optimizer/moments", "000001/run.json"]
    assert "the connection was closed; again in 0.01 s" in caplog.text
    assert "checkpoint/upload_failures" not in uploads.pop_metrics()


def test_an_upload_that_fails_for_good_is_reported_and_a_later_one_makes_up_for_it(
    make_uploads, files, remote, make_checkpoint
):
    files.budget = 25
    uploads = make_uploads()
    uploads.add(make_checkpoint(1))
    with pytest.raises(StorageError, match=r"step-000001 was not uploaded to .*run in 3 attempt.*resuming"):
        uploads.finish()
    assert files.failures == 3
    assert uploads.pop_metrics() == {"checkpoint/upload_failures": 1.0}
    files.budget = None
    uploads.add(make_checkpoint(2))
    uploads.finish()
    assert list(complete_checkpoints(remote)) == ["step-000002"]


def test_the_last_and_the_best_are_kept(make_uploads, remote, make_checkpoint):
    uploads = make_uploads(keep_last=1, keep_best=1)
    for step, score in ((1, 0.2), (2, 0.9), (3, None), (4, 0.1)):
        uploads.add(make_checkpoint(step), score)
        uploads.finish()
    assert list(complete_checkpoints(remote)) == ["step-000002", "step-000004"]
    assert {name.partition("/")[0] for name in remote.sizes()} == {"step-000002", "step-000004"}


def test_what_interrupted_uploads_and_deletions_have_left_is_deleted(make_uploads, remote, make_checkpoint):
    for name in (
        "step-000002/model/weights",
        "step-000002/uploading.json",
        "step-000003/run.json",
        "step-000007/run.json",
    ):
        remote.write(name, b"a")
    remote.write("notes/readme", b"of the user")
    uploads = make_uploads(keep_last=2)
    uploads.add(make_checkpoint(1))
    uploads.finish()
    assert "step-000002/model/weights" in remote.sizes(), "newer ones may be continued"
    uploads.add(make_checkpoint(4))
    uploads.finish()
    assert list(complete_checkpoints(remote)) == ["step-000001", "step-000004"]
    names = {name.partition("/")[0] for name in remote.sizes()}
    assert names == {"step-000001", "step-000004", "step-000007", "notes"}


@pytest.mark.parametrize(("error", "waits"), [(RunInterrupted(2, "resume", "x"), True), (RunTerminated(), False)])
def test_the_first_interrupt_waits_for_the_upload_and_the_second_does_not(
    make_uploads, remote, make_checkpoint, held, error, waits
):
    uploads = make_uploads()
    uploads.add(make_checkpoint(1))
    assert held.begun.wait(60)
    if waits:
        threading.Timer(0.05, held.set).start()
    with pytest.raises(type(error)), uploads.finishing():
        raise error
    assert list(complete_checkpoints(remote)) == (["step-000001"] if waits else [])
    held.set()
    uploads.finish()

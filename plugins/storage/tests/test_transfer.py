"""Interrupted uploads continue and stay invisible; what is fetched is what was sent; addresses that are errors."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path

import fsspec
import pytest
from faulty_files import FaultyFiles

from rlframework.algorithms.checkpoints import kept_checkpoints
from rlframework.base.errors import ConfigError, RunInterrupted, RunTerminated
from rlframework.config.sections import CheckpointsConfig
from rlframework_storage.remote_folder import RemoteFolder, StorageError
from rlframework_storage.transfer import Sent, complete_checkpoints, delete, delete_unfinished, fetch, send
from rlframework_storage.uploads import Uploads


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fetch_newest(remote, destination):
    found = complete_checkpoints(remote)
    name = max(found)
    fetch(remote, name, found[name], destination / name)
    return destination / name


def test_an_interrupted_upload_is_invisible_and_sends_only_the_rest_when_it_is_repeated(remote, files, make_checkpoint):
    source = make_checkpoint(2)
    files.budget = 45  # model/weights (20) is whole, optimizer/moments (30) is cut after 25
    with pytest.raises(
        StorageError, match=r"cannot write /bucket/run/step-000002/optimizer/moments: OSError: the conn"
    ):
        send(source, remote)
    assert complete_checkpoints(remote) == {}
    assert remote.sizes()["step-000002/optimizer/moments"] == 25
    files.budget, files.sent = None, []
    assert send(source, remote) == Sent(2, 40)
    assert files.sent == ["000002/optimizer/moments", "000002/run.json"]
    assert list(complete_checkpoints(remote)) == ["step-000002"]
    assert send(source, remote) == Sent(0, 0)


def same_size(remote):
    remote.write("step-000002/optimizer/moments", b"a" * 29 + b"b")


def shorter(remote):
    remote.write("step-000002/optimizer/moments", b"a" * 29)


def missing(remote):
    remote.delete("step-000002/optimizer/moments")


@pytest.mark.parametrize(
    ("damage", "told"),
    [(same_size, "is damaged.* delete .*uploaded"), (shorter, "is damaged"), (missing, "FileNotFoundError")],
)
def test_a_damaged_file_is_named_and_nothing_is_left(remote, make_checkpoint, tmp_path, damage, told):
    send(make_checkpoint(2), remote)
    damage(remote)
    with pytest.raises(StorageError, match=rf"/bucket/run/step-000002/optimizer/moments:? {told}"):
        fetch_newest(remote, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def test_files_that_changed_since_the_interruption_are_sent_again(remote, files, make_checkpoint, tmp_path):
    source = make_checkpoint(2)
    files.budget = 45
    with pytest.raises(StorageError):
        send(source, remote)
    files.budget = None
    (source / "model" / "weights").write_bytes(b"b" * 20)
    assert send(source, remote) == Sent(3, 60)
    assert contents(fetch_newest(remote, tmp_path / "other")) == contents(source)


def test_another_checkpoint_of_the_same_step_replaces_the_first_one(remote, files, make_checkpoint, tmp_path):
    source = make_checkpoint(2)
    send(source, remote)
    (source / "model" / "weights").rename(source / "model" / "other")
    files.budget = 15
    with pytest.raises(StorageError):
        send(source, remote)
    assert complete_checkpoints(remote) == {}, "a mixture of two checkpoints is visible"
    files.budget = None
    send(source, remote)
    assert contents(fetch_newest(remote, tmp_path / "other")) == contents(source)
    assert "step-000002/model/weights" not in remote.sizes()


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "a/../../evil", "a\\..\\evil", "a//b"])
def test_a_manifest_cannot_name_files_outside_its_folder(remote, name):
    manifest = {"format": 1, "files": {name: {"bytes": 1, "xxh3": "0"}}}
    remote.write("step-000002/uploaded.json", json.dumps(manifest).encode())
    with pytest.raises(StorageError, match="outside its folder"):
        complete_checkpoints(remote)


def test_half_a_manifest_is_no_manifest_and_a_newer_format_is_an_error(remote, make_checkpoint):
    send(make_checkpoint(2), remote)
    whole = remote.read("step-000002/uploaded.json")
    remote.write("step-000002/uploaded.json", whole[:-9])
    assert complete_checkpoints(remote) == {}
    remote.write("step-000002/uploaded.json", whole.replace(b'"format":1', b'"format":2'))
    with pytest.raises(StorageError, match="has format 2; this version reads 1"):
        complete_checkpoints(remote)


def test_deleting_begins_with_the_manifest(remote, files, make_checkpoint):
    send(make_checkpoint(2), remote)
    files.deleted = []
    delete(remote, "step-000002")
    assert files.deleted[0] == "000002/uploaded.json"
    assert remote.sizes() == {}


def test_no_folder_of_a_deleted_checkpoint_is_left_on_a_file_system(make_checkpoint, tmp_path):
    bucket = tmp_path / "bucket"
    remote = RemoteFolder(bucket.as_uri())
    for step in (2, 4, 6):
        send(make_checkpoint(step), remote)
    delete(remote, "step-000002")
    remote.delete("step-000004/uploaded.json")  # a deletion that was interrupted
    delete_unfinished(remote, "step-000006")
    assert [path.name for path in bucket.iterdir()] == ["step-000006"]


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_a_folder_by_its_address(protocol, tmp_path: Path, make_checkpoint):
    remote = RemoteFolder(f"{protocol}://{tmp_path}/far/run/")
    send(make_checkpoint(4), remote)
    found = complete_checkpoints(remote)
    assert list(found) == ["step-000004"]
    fetch(remote, "step-000004", found["step-000004"], tmp_path / "fetched")
    assert (tmp_path / "fetched" / "model" / "weights").read_bytes() == b"a" * 20
    assert remote.sizes("step-000009") == {}
    remote.delete("step-000009/nothing")


def test_a_package_that_is_missing_is_named(monkeypatch):
    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ConfigError, match=r"the package for s3:// is not installed; install it: pip install s3fs"):
        RemoteFolder("s3://bucket/run")


def test_a_protocol_that_does_not_exist():
    with pytest.raises(ConfigError, match=r"checkpoints.upload: nosuch://x cannot be opened: .*nosuch"):
        RemoteFolder("nosuch://x")


def test_a_bucket_that_does_not_exist_is_not_created(make_checkpoint):
    class Buckets(FaultyFiles):
        """Like s3fs: `makedirs` creates the bucket, and files cannot be written without one."""

        protocol = ("s3", "s3a")
        buckets = frozenset({"bucket"})

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            self.buckets |= {path.strip("/").partition("/")[0]}

        def pipe_file(self, path: str, value: bytes, **options: object) -> None:
            if path.strip("/").partition("/")[0] not in self.buckets:
                raise FileNotFoundError("the bucket does not exist")
            super().pipe_file(path, value, **options)

    files = Buckets()
    with pytest.raises(StorageError, match=r"cannot write /buckte/run/step-000001/.*the bucket does not exist"):
        send(make_checkpoint(1), RemoteFolder("/buckte/run", files))
    assert files.buckets == {"bucket"}
    remote = RemoteFolder("/bucket/run", files)
    send(make_checkpoint(1), remote)
    assert list(complete_checkpoints(remote)) == ["step-000001"]


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


def test_an_upload_that_fails_for_good_is_reported(make_uploads, files, remote, make_checkpoint):
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
def test_the_first_interrupt_waits_for_the_upload(make_uploads, remote, make_checkpoint, held, error, waits):
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

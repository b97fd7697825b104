"""Interrupted uploads continue and stay invisible; what is fetched is what was sent."""

from __future__ import annotations

import json

import pytest

from rlframework_storage.remote_folder import RemoteFolder, StorageError
from rlframework_storage.transfer import Sent, complete_checkpoints, delete, delete_unfinished, fetch, send


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fetch_newest(remote, destination):
    found = complete_checkpoints(remote)
    name = max(found)
    fetch(remote, name, found[name], destination / name)
    return destination / name


def test_a_fetched_checkpoint_has_the_files_of_the_one_that_was_sent(remote, make_checkpoint, tmp_path):
    source = make_checkpoint(2)
    assert send(source, remote) == Sent(3, 60)
    assert contents(fetch_newest(remote, tmp_path / "other")) == contents(source)
    assert set(remote.sizes()) == {
        f"step-000002/{name}" for name in ("run.json", "model/weights", "optimizer/moments", "uploaded.json")
    }


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


@pytest.mark.parametrize("damage", [b"a" * 29, b"a" * 29 + b"b"], ids=["shorter", "same size"])
def test_a_damaged_file_is_named_and_nothing_is_left(remote, make_checkpoint, tmp_path, damage):
    send(make_checkpoint(2), remote)
    remote.write("step-000002/optimizer/moments", damage)
    with pytest.raises(StorageError, match=r"/bucket/run/step-000002/optimizer/moments is damaged.* delete .*uploaded"):
        fetch_newest(remote, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def test_a_missing_file_is_named(remote, make_checkpoint, tmp_path):
    send(make_checkpoint(2), remote)
    remote.delete("step-000002/run.json")
    with pytest.raises(StorageError, match=r"cannot read /bucket/run/step-000002/run.json: FileNotFoundError"):
        fetch_newest(remote, tmp_path / "other")


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

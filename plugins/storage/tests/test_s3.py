"""Object storage by its own protocol: s3fs and an S3 server on this machine, over HTTP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from rlframework_storage.remote_folder import RemoteFolder, StorageError
from rlframework_storage.transfer import Sent, complete_checkpoints, delete, fetch, send

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("s3")]

URL = "s3://bucket/run"
FILES = {
    "empty": b"",
    "model/a b+c%20.json": b"c" * 7,
    "model/model.safetensors": bytes(range(256)) * 400,
    "optimizer/moments": b"m" * 30,
}
SIZE = sum(map(len, FILES.values()))


@pytest.fixture
def checkpoint(tmp_path: Path):
    """`checkpoint(step)`: a folder with `FILES`."""

    def make(step: int) -> Path:
        folder = tmp_path / "local" / f"step-{step:06d}"
        for name, content in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder

    return make


def fetched(folder: Path, remote: RemoteFolder, step: int = 2) -> dict[str, bytes]:
    name = f"step-{step:06d}"
    fetch(remote, name, complete_checkpoints(remote)[name], folder / name)
    paths = [path for path in (folder / name).rglob("*") if path.is_file()]
    return {path.relative_to(folder / name).as_posix(): path.read_bytes() for path in paths}


def sent_files(s3) -> list[str]:
    """The files that have been written since the last call, without the lists of files."""
    names = [re.sub(r".*/step-0*(\d+)/", r"\1 ", request) for request in s3.requests("^PUT ")]
    return [name for name in names if not name.endswith(("uploading.json", "uploaded.json"))]


THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize("url", ["s3://bucket/runs/of/mine/", pytest.param("s3://bucket", marks=THOROUGH)])
def test_a_checkpoint_is_there_whole(s3, checkpoint, tmp_path, url):
    """Listings have several pages, and the folders are placeholders, as the services' web pages create them."""
    root = "/" + url.removeprefix("s3://").rstrip("/")
    for folder in (root, f"{root}/step-000002", f"{root}/step-000002/model"):
        s3.ask("PUT", f"{folder}/")
    if root != "/bucket":
        s3.ask("PUT", f"{root}-7/step-000009/uploaded.json", b"no manifest")  # of a run whose name begins like this one
    s3.ask("PUT", f"{root}/step-0000020/other", b"other")
    remote = RemoteFolder(url)
    remote.check()
    assert send(checkpoint(2), remote) == Sent(len(FILES), SIZE)
    assert list(complete_checkpoints(remote)) == ["step-000002"]
    assert fetched(tmp_path / "far", remote) == FILES
    assert send(checkpoint(2), remote) == Sent(0, 0)
    delete(remote, "step-000002")
    assert [name for name in remote.sizes() if name] == ["step-0000020/other"]


FAULTS = [
    pytest.param({}, id="cut"),
    pytest.param({"status": "403 AccessDenied"}, id="refused", marks=THOROUGH),
    pytest.param({"status": "500 InternalError"}, id="broken", marks=THOROUGH),
    pytest.param({"status": "503 SlowDown"}, id="overloaded"),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_an_interrupted_upload_is_no_checkpoint_and_the_next_one_sends_the_rest(s3, checkpoint, tmp_path, fault):
    remote = RemoteFolder(URL)
    s3.fault("PUT .*/model.safetensors", **fault)
    with pytest.raises(StorageError, match=r"cannot write s3://bucket/run/step-000002/model/model.safetensors: "):
        send(checkpoint(2), remote)
    assert complete_checkpoints(remote) == {}
    assert "step-000002/model/model.safetensors" not in remote.sizes()
    s3.clear_fault()
    s3.requests()
    assert send(checkpoint(2), remote) == Sent(2, len(FILES["model/model.safetensors"]) + 30)
    assert sent_files(s3) == ["2 model/model.safetensors", "2 optimizer/moments"]
    assert fetched(tmp_path / "far", remote) == FILES


@pytest.mark.thorough
def test_each_of_its_requests_may_fail(s3, checkpoint, tmp_path):
    remote = RemoteFolder(URL)
    matches = (r"PUT .*/uploading\.json", r"PUT .*/uploaded\.json", r"GET /bucket\?list-type", r"HEAD ", r"DELETE ")
    for step, (match, after) in enumerate(product(matches, range(3)), start=1):
        name = f"step-{step:06d}"
        s3.fault(match, "403 AccessDenied", after=after, times=1)
        try:
            send(checkpoint(step), remote)
        except StorageError:
            s3.clear_fault()
            assert name not in complete_checkpoints(remote) or match == "DELETE "
        s3.clear_fault()
        send(checkpoint(step), remote)
        assert fetched(tmp_path / "far", remote, step) == FILES
        assert f"{name}/uploading.json" not in remote.sizes()


SEND = """
import sys, pathlib
from rlframework_storage.remote_folder import RemoteFolder
from rlframework_storage.uploads import Uploads
uploads = Uploads(RemoteFolder(sys.argv[1]), set)
uploads.add(pathlib.Path(sys.argv[2]))
print(sys.stdin.readline(), flush=True)
"""


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, id="kill -9"), pytest.param(None, id="end", marks=THOROUGH)]
)
def test_a_process_that_ends_during_an_upload(s3, checkpoint, tmp_path, number):
    """Also one that ends by itself, as after a second interrupt: it does not wait for the server."""
    s3.fault("PUT .*/model.safetensors", hold=True)
    words = [sys.executable, "-c", SEND, URL, str(checkpoint(2))]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    requests: list[str] = []
    deadline = time.monotonic() + 60
    while not any("model.safetensors" in request for request in requests):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
        requests += s3.requests("^PUT")
    if number is not None:
        os.kill(process.pid, number)
    _, errors = process.communicate("\n", timeout=60)  # the server holds its answer for ever
    assert process.returncode == (0 if number is None else -number), errors
    assert errors == ""
    remote = RemoteFolder(URL)
    assert complete_checkpoints(remote) == {}
    s3.clear_fault()
    s3.requests()
    send(checkpoint(2), remote)
    assert sent_files(s3) == ["2 model/model.safetensors", "2 optimizer/moments"]
    assert fetched(tmp_path / "far", remote) == FILES


@pytest.fixture
def in_parts():
    """`in_parts(remote)` makes s3fs send files from 10 MiB on in parts of 5 MiB; without it those from 100 MiB on."""

    def change(remote: RemoteFolder) -> RemoteFolder:
        files = remote._fs
        files.put_file = partial(files.put_file, chunksize=5 << 20)
        return remote

    return change


def test_a_file_that_is_sent_in_parts(s3, in_parts, tmp_path):
    remote, folder = in_parts(RemoteFolder(URL)), tmp_path / "local" / "step-000002"
    folder.mkdir(parents=True)
    content = os.urandom(1 << 20) * 12
    (folder / "weights").write_bytes(content)
    s3.fault("PUT .*partNumber=2", "403 AccessDenied")
    with pytest.raises(StorageError, match=r"cannot write s3://bucket/run/step-000002/weights: PermissionError"):
        send(folder, remote)
    assert list(remote.sizes()) == ["step-000002/uploading.json"]
    assert b"<UploadId>" not in s3.ask("GET", "/bucket?uploads"), "parts are left, which cost money"
    s3.clear_fault()
    s3.requests()
    assert send(folder, remote) == Sent(1, 12 << 20)
    assert len(s3.requests("PUT .*partNumber")) == 3
    assert fetched(tmp_path / "far", remote) == {"weights": content}


def test_other_credentials_are_used_from_the_next_time_on(s3, monkeypatch):
    """The file system that fsspec keeps for an address would have those of the first time."""
    right = s3.new_user("s3:*")
    s3.check_credentials()
    with pytest.raises(
        StorageError, match="cannot write s3://bucket/run/write-test: PermissionError: The AWS Access Key"
    ):
        RemoteFolder(URL).check()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", right[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", right[1])
    RemoteFolder(URL).check()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(StorageError, match=r"PermissionError: The request signature we calculated does not match"):
        RemoteFolder(URL).check()


@pytest.mark.thorough
@pytest.mark.parametrize("missing", ["s3:PutObject", "s3:DeleteObject"])
def test_a_permission_that_is_missing(s3, monkeypatch, missing):
    actions = {"s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"} - {missing}
    key, secret = s3.new_user(*actions)
    s3.check_credentials()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with pytest.raises(
        StorageError, match=r"cannot \w+ s3://bucket/run/write-test: PermissionError: .*The bucket must"
    ):
        RemoteFolder(URL).check()

"""Images at http addresses of a server in the test: each is read once, within limits, if the key allows it."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rlframework.base.errors import ImageError
from rlframework.config.environments import DatasetConfig
from rlframework.config.sections import ImagesConfig
from rlframework.datasets import pictures
from rlframework.datasets.pictures import ImageAddresses, PictureReader, decoded
from rlframework.environments.dataset import DatasetEnvironment
from rlframework.interfaces.messages import pictures_of
from rlframework_preferences.config import PreferencesConfig
from rlframework_preferences.preference_samples import PreferencesEnvironment


def png(shade: int) -> bytes:
    stored = BytesIO()
    Image.new("RGB", (8, 8), (shade, 1, 2)).save(stored, "PNG")
    return stored.getvalue()


REDIRECTIONS = {"to-30": "/30", "to-file": "file:///etc/hostname"}


def response(name: str, attempt: int) -> tuple[int, bytes]:
    """The status and the content at a path; `later` has an image at the second attempt only."""
    if name == "later":
        name = "20" if attempt > 1 else "busy"
    if name.isdigit():
        return 200, png(int(name))
    pages = {"busy": (503, b"none"), "no-image": (200, b"<html>"), "large": (200, bytes(3000)), "cut": (200, png(1))}
    return pages.get(name, (404, b"none"))


class Handler(BaseHTTPRequestHandler):
    requests: Counter[str]
    released: threading.Event

    def do_GET(self) -> None:
        name = self.path[1:]
        self.requests[name] += 1
        if name == "slow":
            self.released.wait(60)
        status, body = response(name, self.requests[name])
        self.send_response(302 if name in REDIRECTIONS else status)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body) + (5 if name == "cut" else 0)))
        if name in REDIRECTIONS:
            self.send_header("Location", REDIRECTIONS[name])
        self.end_headers()
        with suppress(ConnectionError):  # the client may have given up
            self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server; `Handler.requests` counts its requests by path."""
    monkeypatch.setattr(Handler, "requests", Counter(), raising=False)
    monkeypatch.setattr(Handler, "released", threading.Event(), raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        Handler.released.set()
        made.shutdown()


def test_each_address_is_read_once(server: str, tmp_path: Path) -> None:
    """For rows of a data set and for preference pairs, whatever content type the server claims."""
    names = ["20", "30", "to-30", "later"]
    rows = [{"prompt": f"<image>{n}?", "image": f"{server}/{names[n % 4]}", "answer": str(n)} for n in range(8)]
    pairs = [row | {"chosen": "yes", "rejected": "no"} for row in rows]
    images, fraction = {"allow_addresses": True}, 0.3
    for name, given in (("rows", rows), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    answered = DatasetConfig(path=f"{tmp_path}/rows.jsonl", check="exact", images=images, validation_fraction=fraction)
    paired = PreferencesConfig(path=f"{tmp_path}/pairs.jsonl", images=images, validation_fraction=fraction)
    for opened in (lambda: DatasetEnvironment(answered, seed=0), lambda: PreferencesEnvironment(paired, seed=0)):
        environment = opened()
        for _ in range(2):
            samples = [*environment.samples("train"), *environment.samples("validation")]
            shades = [
                decoded(picture).getpixel((0, 0))[0] for each in samples for picture in pictures_of(each.messages)
            ]
            assert sorted(shades) == [20] * 4 + [30] * 4
        assert Handler.requests == {"20": 1, "30": 2, "to-30": 1, "later": 2}
        Handler.requests.clear()


def counted(name: str, requests: int) -> bool:
    """Wait until the server has seen so many requests: those that were given up may not have reached it."""
    until = time.monotonic() + 60
    while Handler.requests[name] < requests and time.monotonic() < until:
        time.sleep(0.01)
    return Handler.requests[name] == requests


@pytest.mark.parametrize(
    ("name", "problem", "requests"),
    [
        ("gone", "the image cannot be read: the server answers 404 Not Found", 1),
        ("busy", "the image cannot be read: the server answers 503 Service Unavailable", 2),
        ("large", "the image cannot be read: it has more than 2,000 bytes", 1),
        ("slow", "the image cannot be read: timed out", 2),
        ("cut", "the image cannot be read: the connection ended 5 bytes before the end", 2),
        ("to-file", "the image cannot be read: .*Redirection to url 'file:.* not allowed", 1),
        ("no-image", "the image is in no known format, or damaged", 1),
    ],
)
def test_what_cannot_be_read_names_address_and_row(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, problem: str, requests: int
) -> None:
    monkeypatch.setattr(pictures, "MAX_BYTES", 2000)
    monkeypatch.setattr(pictures, "TIMEOUT", 0.3 if name == "slow" else 60.0)
    rows = [{"prompt": "a", "answer": "1"}, *({"prompt": "b", "answer": "2", "image": f"{server}/{name}"},) * 3]
    rows.append({"prompt": "c", "answer": "3"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys: dict[str, Any] = {"path": f"{tmp_path}/rows.jsonl", "check": "exact"}
    with pytest.raises(ImageError, match=rf"rows\.jsonl, line 2, column 'image', {server}/{name}: {problem}"):
        DatasetEnvironment(DatasetConfig(**keys, images={"allow_addresses": True}), seed=0)
    assert counted(name, requests)
    Handler.requests.clear()
    images = {"allow_addresses": True, "invalid": "skip"}
    environment = DatasetEnvironment(DatasetConfig(**keys, images=images), seed=0)
    assert len(environment.samples("train")) + len(environment.samples("validation")) == 2
    assert counted(name, requests)
    assert Handler.requests == {name: requests}


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("http://", "no host given"),
        ("http://[x/", "Invalid IPv6"),
        ("http://a b/?token=hunter2", "control"),
        ("http://me:hunter2@127.0.0.1/", "addresses with a user name or password are not supported"),
    ],
)
def test_addresses_that_are_none_and_passwords(tmp_path: Path, address: str, problem: str) -> None:
    """Neither `read` nor the reader of rows shows a password."""
    reader = PictureReader(ImagesConfig(allow_addresses=True), tmp_path, ImageAddresses())
    for read in (ImageAddresses().read, reader.of):
        with pytest.raises(ImageError, match=f"here.*: the image cannot be read: .*{problem}") as raised:
            read(address, "here")
        assert "hunter2" not in str(raised.value)

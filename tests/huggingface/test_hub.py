"""Models that are not there: a missing path and a hub that does not answer are errors, after one question at most."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rlframework.base.errors import DataError
from rlframework.datasets.sources.opening import open_rows
from rlframework.huggingface import hub
from rlframework.huggingface.hub import local_files_only, require_available
from rlframework.huggingface.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

CONFIG = """
algorithm: {name: grpo, num_steps: 1}
environment: {name: addition}
policy: {model_name: org/model}
generation: {max_new_tokens: 8}
output_dir: run
"""


class Silent:
    """A server that accepts connections and never answers."""

    def __init__(self, server: socket.socket) -> None:
        server.setblocking(False)
        self._server, self.url = server, f"http://127.0.0.1:{server.getsockname()[1]}"

    def connections(self) -> int:
        """The number of connections since the last call."""
        number = 0
        with suppress(BlockingIOError):
            while True:
                self._server.accept()[0].close()
                number += 1
        return number


@pytest.fixture
def silent() -> Iterator[Silent]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Silent(server)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Neither offline mode nor a cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return monkeypatch


def test_a_missing_path_is_an_error_at_once(online: pytest.MonkeyPatch, silent: Silent, tmp_path: Path) -> None:
    """Without a question to the hub, which would take 4 s here."""
    online.setenv("HF_ENDPOINT", silent.url)
    with pytest.raises(DataError, match=r"policy\.model_name='\./nowhere': there is no such directory .*Give a model"):
        require_available("./nowhere")
    assert silent.connections() == 0
    require_available(str(tmp_path))


@pytest.mark.parametrize("call", [require_available, load_tokenizer])
def test_a_hub_that_never_answers(online: pytest.MonkeyPatch, silent: Silent, call) -> None:
    online.setenv("HF_ENDPOINT", silent.url)
    with pytest.raises(
        DataError, match=rf"'org/model' is neither .* {silent.url} did not answer within 4 s\. Check the"
    ):
        call("org/model")
    assert silent.connections() == 1


def test_a_hub_that_refuses_connections(online: pytest.MonkeyPatch) -> None:
    online.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"at http://127\.0\.0\.1:9 cannot be reached \(.*hf download org/model"):
        require_available("org/model", "policy.tokenizer_name")
    with pytest.raises(DataError, match=r"the data set 'org/data' .*127\.0\.0\.1:9 cannot be reached"):
        open_rows("org/data")


@pytest.mark.parametrize(("status", "problem"), [(200, None), (401, None), (404, None), (503, "HTTP status 503")])
def test_any_answer_but_a_server_error_is_an_answer(
    online: pytest.MonkeyPatch, status: int, problem: str | None
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        online.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
        found = hub.hub_problem()
        server.shutdown()
    assert found is None if problem is None else problem in str(found)


@pytest.mark.thorough
def test_a_cached_model_is_used_when_the_hub_cannot_be_reached(
    online: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    online.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    snapshot = tmp_path / "cache/models--org--model/snapshots/0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 77}')
    (tmp_path / "cache/models--org--model/refs").mkdir()
    (tmp_path / "cache/models--org--model/refs/main").write_text("0123")
    require_available("org/model")
    assert local_files_only("org/model")
    hub.announce_hub_request("org/model")
    assert "cannot be reached" in caplog.text
    # in a process of its own, because the hub's client reads the variable on import
    program = "from rlframework.huggingface.model_directories import *; print(model_positions('org/model'))"
    variables = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path / "cache")}
    assert run([sys.executable, "-c", program], **variables).stdout == "77\n"


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_OFFLINE")}
    return subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("words", [["train", "run.yaml"], ["evaluate", "org/model"], ["generate", "org/model", "hi"]])
def test_commands_ask_the_hub_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: Silent, words: list[str]
) -> None:
    """Before torch is imported, which takes seconds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    program = "import sys; from rlframework.cli.__main__ import main; main(sys.argv[1:])"
    done = run([sys.executable, "-c", program, *words], HF_ENDPOINT=silent.url, HF_HOME=str(tmp_path / "home"))
    assert done.returncode == 2, done.stderr
    assert "='org/model' is neither a directory nor in the hub's cache" in done.stderr
    assert silent.connections() == 1

"""A local HTTP server of chat completions, whose replies and faults are given by the test."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TRIAL = "Question: What is 1 + 1? Completion: 2 Reference: 2"
PROMPT = "Question: {question} Completion: {completion} Reference: {answer}"

Answer = tuple[int, dict[str, str], bytes]


def completion(text: str | None) -> Answer:
    message = {"role": "assistant", "content": text}
    body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [{"message": message}]}
    return 200, {}, json.dumps(body).encode()


def failure(status: int, text: str = "no", **headers: str) -> Answer:
    return status, headers, json.dumps({"error": {"message": text}}).encode()


@dataclass
class Server:
    """Answers requests by `reply(prompt, attempt)`, where `attempt` counts those of the prompt from 0.

    `trial` is the answer to the first request of a run.
    """

    reply: Callable[[str, int], Answer]
    url: str = ""
    trial: Answer = field(default_factory=lambda: completion("Score: 10"))
    requests: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        prompt = body["messages"][0]["content"]
        with self.lock:
            attempt = [asked for asked, _, _ in self.requests].count(prompt)
            self.requests.append((prompt, body, headers))
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            return self.trial if prompt == TRIAL else self.reply(prompt, attempt)
        finally:
            with self.lock:
                self.running -= 1

    def asked(self) -> list[str]:
        """The prompts after the first request of each start."""
        return [prompt for prompt, _, _ in self.requests if prompt != TRIAL]


@contextmanager
def serving(reply: Callable[[str, int], Answer]) -> Iterator[Server]:
    server = Server(reply)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions"
            given = {name.lower(): value for name, value in self.headers.items()}
            status, headers, content = server.answer(body, given)
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def handle(self) -> None:
            with suppress(ConnectionError):  # of a client that does not wait
                super().handle()

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()

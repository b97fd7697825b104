"""The process of a verifiers environment, which runs `verifiers_server.py` in a Python environment of its own.

A thread starts it and reads its answers, because the kernel ends the process with the thread that started it, and
because it outlives the event loops of rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

from rlframework.base.errors import ConfigError, RLFrameworkError
from rlframework.environments import process_ends
from rlframework_environments import verifiers_server
from rlframework_environments.config import VerifiersConfig

_PASSED = ("HOME", "LANG", "LOGNAME", "SHELL", "SSL_CERT_DIR", "SSL_CERT_FILE", "TERM", "TMPDIR", "USER")
"""Environment variables that the process gets, besides PATH and those of `VerifiersConfig.variables`."""

_END_SECONDS = 10.0
"""For the process to end the programs of its attempts, before it is killed."""

_LOG_CHARACTERS = 2000


class VerifiersProcess:
    """A running environment with `tasks`, the data of at most `VerifiersConfig.most_tasks` of its tasks."""

    def __init__(self, config: VerifiersConfig) -> None:
        """Start the process. Raises `ConfigError` with what it wrote if it does not load the environment."""
        self._config = config
        self._name = f"the verifiers environment of {config.python!r} (environment.python)"
        self._lock, self._numbers = threading.Lock(), count()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self.lost = False
        self._link, other = socket.socketpair()
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - see `end`
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(other, started), name="verifiers", daemon=True)
        self._thread.start()
        try:
            started.result()
            opened = self._send(settings=config.settings, tasks=config.most_tasks).result(config.start_timeout)
        except (OSError, RLFrameworkError) as error:
            reason = "it has ended" if isinstance(error, RLFrameworkError) else f"{error}"
            if isinstance(error, TimeoutError):
                reason = f"it did not answer within {config.start_timeout:g} s (environment.start_timeout)"
            written = self._log()
            self.end()
            raise ConfigError(f"{self._name} did not start: {reason}{written}") from error
        if "error" in opened:
            written = self._log()
            self.end()
            raise ConfigError(f"{self._name} does not load environment.settings: {opened['error']}{written}")
        self.tasks: list[dict[str, Any]] = opened["tasks"]

    async def attempt(self, task: int, *, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        """Return the answer for an attempt at a task, which ends if this is cancelled. See `verifiers_server`.

        Raises `RLFrameworkError` if the process has ended.
        """
        number = next(self._numbers)
        future = self._send(number, task=task, base_url=base_url, api_key=api_key, model=model)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with contextlib.suppress(RLFrameworkError):  # the process has ended, and the attempt with it
                self._send(cancel=number)
            raise

    def end(self) -> None:
        """End the process, and wait until it has ended."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * _END_SECONDS)
        self._link.close()
        self._stderr.close()

    def _send(self, number: int | None = None, **request: Any) -> Future[dict[str, Any]]:
        """Send a request, and return the future of its answer; a cancellation has none."""
        number = next(self._numbers) if number is None else number
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self.lost:
                raise RLFrameworkError(f"{self._name} has ended{self._log()}")
            if "cancel" not in request:
                self._waiting[number] = future
            with contextlib.suppress(OSError):  # the reader notices the end of the process
                self._link.sendall(json.dumps({"id": number, **request}).encode() + b"\n")
        return future

    def _run(self, other: socket.socket, started: Future[None]) -> None:
        try:
            process = self._start(other)
        except OSError as error:
            started.set_exception(error)
            return
        finally:
            other.close()
        started.set_result(None)
        self._read()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self, other: socket.socket) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", process_ends.__file__, self._config.python, "-P", verifiers_server.__file__]
        scripts = str(Path(self._config.python).absolute().parent)  # as if the environment was activated
        given = {name: os.environ[name] for name in (*_PASSED, *self._config.variables) if name in os.environ}
        given["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
        return subprocess.Popen(command, stdin=other.fileno(), stdout=self._stderr, stderr=self._stderr, env=given)

    def _read(self) -> None:
        """Settle the requests with their answers until the process ends; those left then fail."""
        with contextlib.suppress(OSError), self._link.makefile("rb") as answers:
            for line in answers:
                answer = json.loads(line)
                future = self._waiting.pop(answer["id"], None)
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_result(answer)
        with self._lock:
            self.lost = True
            left, self._waiting = list(self._waiting.values()), {}
        for future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(RLFrameworkError(f"{self._name} has ended{self._log()}"))

    def _log(self) -> str:
        """The end of what the process wrote."""
        try:
            size = os.fstat(self._stderr.fileno()).st_size
            text = os.pread(self._stderr.fileno(), 1_000_000, max(0, size - 1_000_000)).decode(errors="replace").strip()
        except (OSError, ValueError):  # it has been closed
            return ""
        return f". It wrote:\n{text[-_LOG_CHARACTERS:]}" if text else ""

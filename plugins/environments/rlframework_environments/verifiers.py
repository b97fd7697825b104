"""Tasks and agents of a verifiers environment, which runs in a Python environment of its own.

Its agents are programs with a loop of their own: they talk to the run's endpoint, as those of `agent_environment`.

A thread starts the process, which runs `verifiers_server.py`, and reads its answers: the kernel ends the process with
the thread that started it, and it outlives the event loops of rollouts.
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
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from rlframework.base.errors import ConfigError, RLFrameworkError
from rlframework.environments import process_ends
from rlframework.interfaces.environment import AgentSession, Environment, NoReward, Sample, Split, StepOutcome
from rlframework.interfaces.messages import Message
from rlframework_environments import verifiers_server
from rlframework_environments.config import VerifiersConfig

_PASSED = ("HOME", "LANG", "LOGNAME", "SHELL", "SSL_CERT_DIR", "SSL_CERT_FILE", "TERM", "TMPDIR", "USER")
"""Environment variables that the process gets, besides PATH and those of `VerifiersConfig.variables`."""

_END_SECONDS = 10.0
"""For the process to end the programs of its attempts, before it is killed."""

_LOG_CHARACTERS = 2000


class VerifiersEnvironment(Environment):
    """The first tasks of a taskset: `validation_samples` of them held out, and at most `train_samples` after them."""

    def __init__(self, config: VerifiersConfig, *, seed: int) -> None:
        """Note the configuration; no process is started yet."""
        self._config = config
        self._lock = threading.Lock()
        self._process: VerifiersProcess | None = None

    def samples(self, split: Split) -> Sequence[Sample]:
        """Return the tasks of a split. Starts the process; raises `ConfigError` if it cannot be used."""
        held_out = self._config.validation_samples
        return self._samples[:held_out] if split == "validation" else self._samples[held_out:]

    async def run_agent(self, sample: Sample, session: AgentSession) -> StepOutcome:
        """Let the environment's agent attempt `sample`. Raises `RLFrameworkError` if it fails."""
        process = await asyncio.to_thread(self._running)
        answer = await process.attempt(
            sample.metadata["number"], base_url=session.base_url, api_key=session.api_key, model=session.model
        )
        if "error" in answer:
            raise RLFrameworkError(f"verifiers: {answer['error']}")
        return StepOutcome(answer["reward"], metrics=answer["metrics"])

    async def score_answer(self, sample: Sample, answer: str) -> StepOutcome:
        """Raise `NoReward`: the reward is always what `run_agent` returns."""
        raise NoReward("a verifiers environment scores attempts, not answers")

    def shutdown(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.end()

    @cached_property
    def _samples(self) -> list[Sample]:
        tasks, held_out = self._running().tasks, self._config.validation_samples
        if len(tasks) <= held_out:
            raise ConfigError(
                f"the taskset of environment.settings has {len(tasks)} tasks, and environment.validation_samples="
                f"{held_out} are held out; lower that"
            )
        return [_sample(number, task) for number, task in enumerate(tasks)]

    def _running(self) -> VerifiersProcess:
        """The process, which is started the first time, and again if it has ended."""
        with self._lock:
            if self._process is not None and self._process.lost:
                self._process.end()
                self._process = None
            if self._process is None:
                self._process = VerifiersProcess(self._config)
            return self._process


def _sample(number: int, task: Mapping[str, Any]) -> Sample:
    """The task as a sample. Its messages are for samples of the run and reports: the agent makes its own."""
    system, prompt = task.get("system_prompt"), task.get("prompt")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, list):
        messages += [{"role": str(said.get("role")), "content": _text(said.get("content"))} for said in prompt]
    else:
        messages.append({"role": "user", "content": prompt or task.get("description") or task.get("name") or "-"})
    name = task.get("id") or task.get("name") or f"task {number}"
    return Sample(str(name), tuple(messages), "", metadata={"number": number, **task})


def _text(content: Any) -> str:
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


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

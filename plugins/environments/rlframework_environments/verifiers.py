"""Tasks and agents of a verifiers environment, which runs in a Python environment of its own.

Its agents are programs with a loop of their own: they talk to the run's endpoint, as in `environments/agent.py`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from rlframework.base.errors import ConfigError, RLFrameworkError
from rlframework.interfaces.environment import AgentSession, Environment, NoReward, Sample, Split, StepOutcome
from rlframework.interfaces.messages import Message
from rlframework_environments.config import VerifiersConfig
from rlframework_environments.verifiers_process import VerifiersProcess


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

"""Serve the tasks and rollouts of a verifiers environment: `python -P verifiers_server.py`.

It runs in a Python environment with verifiers, without rlframework. Its standard input is a socket, on which each line
is a JSON object with an `id`, which its answer has too:

- `{"settings": ..., "tasks": 8}`, once and first: load the environment; answered by `{"tasks": [...]}`.
- `{"task": 3, "base_url": ..., "api_key": ..., "model": ...}`: let the environment's agent attempt a task with this
  model; answered by `{"reward": ..., "metrics": {...}}`.
- `{"cancel": 5}`: end the attempt with that id.

What fails is answered by `{"error": "..."}`. The process ends when the socket is closed.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Mapping
from itertools import islice
from typing import Any


class Server:
    """Answers the requests of `reader` on `writer`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Serve until the socket is closed, and end the attempts that are left."""
        opening = json.loads(await self._reader.readline())
        try:
            environment, tasks = _open(opening["settings"], opening["tasks"])
            found = [task.data.model_dump(mode="json") for task in tasks]
        except Exception as error:  # noqa: BLE001 - a package of somebody else's may raise anything
            self._answer(opening["id"], error=f"{type(error).__name__}: {error}")
            return
        async with environment.serving():
            self._answer(opening["id"], tasks=found)
            try:
                while line := await self._reader.readline():
                    self._take(environment, tasks, json.loads(line))
            finally:
                for task in self._running.values():
                    task.cancel()
                await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _take(self, environment: Any, tasks: list[Any], request: Mapping[str, Any]) -> None:
        number = request["id"]
        if "cancel" in request:
            if (task := self._running.get(request["cancel"])) is not None:
                task.cancel()
            return
        self._running[number] = asyncio.create_task(self._attempt(environment, tasks[request["task"]], request))
        self._running[number].add_done_callback(lambda _: self._running.pop(number))

    async def _attempt(self, environment: Any, task: Any, request: Mapping[str, Any]) -> None:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        variable = f"RLFRAMEWORK_API_KEY_{request['id']}"  # verifiers keeps variables with API_KEY from programs
        os.environ[variable] = request["api_key"]
        try:
            client = EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
            episode = await environment.run_episode(task, ModelContext(model=request["model"], client=client))
            self._answer(request["id"], **_result(episode, request["base_url"]))
        except Exception as error:  # noqa: BLE001 - one attempt alone fails
            self._answer(request["id"], error=f"{type(error).__name__}: {error}")
        finally:
            del os.environ[variable]

    def _answer(self, number: int, **answer: Any) -> None:
        self._writer.write(json.dumps({"id": number, **answer}).encode() + b"\n")


def _open(settings: Mapping[str, Any], most: int) -> tuple[Any, list[Any]]:
    """Return the environment with `settings`, and at most `most` of its tasks."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    environment = load_environment(resolve_env_config(dict(settings)))
    return environment, list(islice(environment.taskset, most))


def _result(episode: Any, base_url: str) -> dict[str, Any]:
    """The reward and the metrics of an episode: means over its traces that train the model.

    An agent that does not train it may not have used the endpoint at `base_url`, all of whose turns are trained on.
    """
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    for agent in (trace.agent for trace in episode.traces if not trace.agent.trainable):
        if agent.config.client.base_url == base_url:
            text = f"the agent {agent.name!r} does not train the model, but uses it; set its client in settings"
            return {"error": text}
    if not episode.ok or not traces:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        text = f"{errors[-1].type}: {errors[-1].message}" if errors else "no agent has run to its end"
        return {"error": text[:2000]}
    found: defaultdict[str, list[float]] = defaultdict(list)
    for trace in traces:
        parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        for name, value in {**trace.metrics, **parts}.items():
            if value is not None:
                found[name].append(float(value))
    rewards = [float(trace.reward) for trace in traces]
    return {
        "reward": sum(rewards) / len(rewards),
        "metrics": {name: sum(values) / len(values) for name, values in found.items()},
    }


async def main() -> None:
    """Serve on standard input. What the environment prints goes to standard error."""
    link = socket.socket(fileno=os.dup(0))
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    reader, writer = await asyncio.open_connection(sock=link, limit=2**26)
    await Server(reader, writer).serve()
    await writer.drain()


if __name__ == "__main__":
    sys.path.append(os.getcwd())
    asyncio.run(main())

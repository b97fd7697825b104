"""The part of verifiers that `verifiers_server.py` uses, for tests: attempts at a task do what its prompt says."""

import asyncio
import json
import os
import urllib.request
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

EvalClientConfig = ModelContext = SimpleNamespace


class Environment:
    def __init__(self, settings):
        self.taskset = (task(prompt) for prompt in settings["taskset"]["prompts"])

    @asynccontextmanager
    async def serving(self):
        print("serving")
        yield
        Path("served").touch()

    async def run_episode(self, task, context):
        return await ATTEMPTS.get(task.data.prompt, asks)(task.data.prompt, context)


def task(prompt):
    data = SimpleNamespace(prompt=prompt, model_dump=lambda mode: {"prompt": prompt, "name": f"task {prompt}"})
    return SimpleNamespace(data=data)


def trace(reward, trainable=True, client=None, **keys):
    agent = SimpleNamespace(name="solver", trainable=trainable, config=SimpleNamespace(client=client))
    parts = {"right": SimpleNamespace(score=reward), "left_out": None}
    return SimpleNamespace(**{"agent": agent, "rewards": parts, "reward": reward, "metrics": {}, "errors": [], **keys})


def episode(*traces, errors=()):
    return SimpleNamespace(ok=not errors, errors=list(errors), traces=list(traces))


async def asks(prompt, context):
    """Reward: the fraction of digits in the model's answer."""

    def answer():
        body = {"model": context.model, "messages": [{"role": "user", "content": prompt}]}
        key = os.environ[context.client.api_key_var]
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        address = context.client.base_url + "/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), headers)) as reply:
            return json.load(reply)["choices"][0]["message"]["content"]

    text = await asyncio.to_thread(answer)
    return episode(trace(sum(map(str.isdigit, text)) / max(len(text), 1)))


async def means(prompt, context):
    judge = SimpleNamespace(base_url="http://judge/v1")
    return episode(trace(0.5, metrics={"turns": 2.0}), trace(1.0, metrics={"turns": 5.0}), trace(9.0, False, judge))


async def shares(prompt, context):
    return episode(trace(1.0), trace(0.0, False, context.client))


async def breaks(prompt, context):
    return episode(trace(0.0), errors=[SimpleNamespace(type="SandboxError", message="no sandbox")])


async def runs_nobody(prompt, context):
    return episode()


async def variables(prompt, context):
    return episode(trace(0.0, metrics={name: float(name in os.environ) for name in ("GIVEN", "SECRET")}))


async def raises(prompt, context):
    raise RuntimeError("broken")


async def ends(prompt, context):
    print("out of memory", flush=True)
    os._exit(3)


async def hangs(prompt, context):
    Path("hanging").touch()
    try:
        await asyncio.sleep(600)
    finally:
        Path("cancelled").touch()


_KINDS = (means, shares, breaks, runs_nobody, variables, raises, ends, hangs)
ATTEMPTS = {attempt.__name__: attempt for attempt in _KINDS}


def resolve_env_config(settings):
    if "taskset" not in settings:
        raise ValueError("taskset.id is missing")
    return settings


load_environment = Environment

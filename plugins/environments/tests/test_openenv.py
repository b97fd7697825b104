"""OpenEnv servers: a scripted one of the protocol, and a real one in a Python environment of its own."""

import asyncio
import itertools
import json
import os
import re
import socket
import subprocess
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from episode_play import play, says, texts
from pydantic import ValidationError
from websockets.sync.server import serve

from rlframework import run
from rlframework.base.errors import RLFrameworkError
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework_environments import openenv
from rlframework_environments.config import OpenEnvConfig
from rlframework_environments.openenv import OpenEnvEnvironment

PYTHON = os.environ.get("OPENENV_PYTHON", "")
SHOWN = {"observation": {"text": "start", "metadata": {}}, "reward": None, "done": False}
DONE = {"observation": {"text": "end"}, "reward": 1, "done": True}


def make(url, **keys):
    return OpenEnvEnvironment(OpenEnvConfig(url=url, train_samples=6, validation_samples=2, **keys), seed=0)


@pytest.fixture
def start():
    """Start a server that answers a connection's messages in turn, and closes it after; return its address and log."""
    servers = []

    def start(*connections, **keys):
        scripts, log = list(connections), []

        def answer(link):
            for reply in scripts.pop(0):
                log.append(json.loads(link.recv()))
                link.send(reply if isinstance(reply, str) else json.dumps(reply))

        servers.append(serve(answer, "127.0.0.1", 0, **keys))
        thread = threading.Thread(target=servers[-1].serve_forever)
        thread.start()
        servers.append(thread)
        return f"ws://127.0.0.1:{servers[-2].socket.getsockname()[1]}/ws", log

    yield start
    for server, thread in zip(servers[::2], servers[1::2], strict=True):
        server.shutdown()
        thread.join()


def shown(**data):
    return {"type": "observation", "data": {**SHOWN, **data}}


def error(code, **data):
    return {"type": "error", "data": {"message": "refused", "code": code, **data}}


def test_an_episode(start):
    refused = error("VALIDATION_ERROR", errors=[{"type": "string_too_short", "msg": "too short \ud800"}])
    replies = [
        shown(), refused, shown(reward=-0.25), shown(reward=True, observation={"text": "\ud800"}),
        {"type": "observation", "data": DONE},
    ]  # fmt: skip
    url, log = start(replies)
    environment = make(url, action="word", observation="text", prompt="Play: {observation}", solved_reward=1.75)
    sample = environment.samples("train")[0]
    _, first, outcomes = play(environment, sample, [says(turn) for turn in "abcd"])
    assert first == ({"role": "user", "content": "Play: start"},)
    assert [outcome.reward for outcome in outcomes] == [0.0, -0.25, 1.0, 1.0]
    assert [texts(outcome) for outcome in outcomes] == [["error: refused: too short ?"], ["start"], ["?"], []]
    assert (outcomes[-1].done, dict(outcomes[-1].metrics)) == (True, {"accuracy": 1.0})
    assert log[0] == {"type": "reset", "data": {"seed": sample.metadata["seed"]}}
    assert log[1:] == [{"type": "step", "data": {"word": turn}} for turn in "abcd"]


def test_tasks_are_seeds_and_observations_may_be_json(start):
    url, _ = start([shown(), {"type": "observation", "data": DONE}])
    environment = make(url, solved_reward=1.5)
    seeds = [sample.metadata["seed"] for split in ("train", "validation") for sample in environment.samples(split)]
    assert len(set(seeds)) == 8
    _, first, outcomes = play(environment, environment.samples("train")[0], [says("a")])
    assert json.loads(first[0]["content"]) == SHOWN["observation"]
    assert dict(outcomes[0].metrics) == {"accuracy": 0.0}  # a reward of 1 does not solve it


@pytest.mark.parametrize(
    ("turn", "reply", "problem"),
    [
        (1, {"type": "observation", "data": {"observation": {}, "reward": 0}}, "answered step with done='missing'"),
        (1, shown(done="no"), "answered step with done='no'; it must be true or false"),
        (1, shown(reward="1"), "answered step with the reward '1'; it must be null or a number of at most 1e+12"),
        (1, shown(reward=float("nan")), "answered step with the reward nan"),
        (1, shown(reward=10**400), "answered step with the reward 1000"),
        (1, shown(observation={"word": 1}), "environment.observation='text'; its observation has word"),
        (1, "{", "failed at step: JSONDecodeError"),
        (1, "[" * 100_000, "failed at step: RecursionError"),
        (1, "[]", "answered step with [], which is neither"),
        (1, {"type": "state", "data": {}}, "answered step with {'type': 'state', 'data': {}}, which is neither"),
        (1, error("EXECUTION_ERROR"), "answered step with the error refused"),
        (1, error("VALIDATION_ERROR", errors=[{"type": "missing", "msg": "Field required"}]),
         "field 'message' alone (environment.action): refused: Field required"),
        (1, None, "failed at step: ConnectionClosed"),
        (0, shown(done=True), "answered reset with an episode that is done"),
        (0, error("FACTORY_ERROR"), "answered reset with the error refused"),
        (0, error("CAPACITY_REACHED"), "refused; lower environment.max_concurrent_episodes, or start the server with"),
        (0, None, "failed at reset: ConnectionClosed"),
    ],
    ids=range(17),
)  # fmt: skip
def test_a_wrong_answer_names_address_sample_and_turn(start, monkeypatch, turn, reply, problem):
    replies = [shown()] * turn + ([] if reply is None else [reply])
    url, _ = start(*[replies] * 50)
    clock = itertools.count(0.0, 40.0)  # so that a server without room is asked twice
    monkeypatch.setattr(openenv, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    environment = make(url, observation="text", connect_timeout=60.0)
    sample = environment.samples("train")[0]
    where = f"(sample 'seed {sample.metadata['seed']}', {'turn 1' if turn else 'reset'})"
    with pytest.raises(RLFrameworkError) as raised:
        play(environment, sample, [says("a")])
    assert type(raised.value) is RLFrameworkError
    assert re.search(rf"environment\.url='{url}' .*{re.escape(problem)}.*{re.escape(where)}$", str(raised.value))


def test_a_server_that_cannot_be_connected_to(start):
    refusing, _ = start(process_request=lambda link, request: link.respond(403, "no"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        for url, problem in (
            (refusing, "InvalidStatus: .*403"),
            (f"ws://127.0.0.1:{unused.getsockname()[1]}/ws", "ConnectionRefusedError"),
        ):
            environment = make(url, connect_timeout=60.0)
            with pytest.raises(
                RLFrameworkError, match=rf"'{url}' cannot be connected to: {problem}.*'seed \d+', reset"
            ):
                play(environment, environment.samples("train")[0], [])


@pytest.mark.slow
def test_a_server_without_room_is_asked_again(start):
    full = [error("CAPACITY_REACHED")]
    url, log = start(full, full, [shown(), {"type": "observation", "data": DONE}])
    environment = make(url)
    assert play(environment, environment.samples("train")[0], [says("a")])[2][0].reward == 1.0
    assert [message["type"] for message in log] == ["reset", "reset", "reset", "step"]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"url": "http://127.0.0.1:8000/ws"}, "must be the address of a WebSocket, such as ws://127.0.0.1:8000/ws"),
        ({"url": "ws:8000"}, "must be the address of a WebSocket"),
        ({"url": "ws://127.0.0.1/ws", "prompt": "Play."}, r"must contain \{observation\}"),
    ],
)
def test_a_wrong_configuration(keys, problem):
    with pytest.raises(ValidationError, match=problem):
        OpenEnvConfig(**keys)


@pytest.mark.slow
def test_a_run(run_config, tmp_path, start):
    """GRPO: every second episode is rewarded, and what is sent is what the model has said."""
    ends = [{"type": "observation", "data": {**DONE, "reward": number % 2}} for number in range(200)]
    url, log = start(*[[shown(), end] for end in ends])
    letters = character_tokenizer("".join(map(chr, range(32, 127))))
    model = make_llama(tmp_path / "m", letters, hidden=16, layers=1, heads=2, max_positions=256)
    chosen = {
        "name": "openenv",
        "url": url,
        "action": "word",
        "observation": "text",
        "train_samples": 8,
        "max_episode_tokens": 64,
    }
    keys = ["~environment", "environment=" + json.dumps({**chosen, "validation_samples": 2})]
    keys += ["algorithm.num_steps=2", f"policy.model_name={model}", "generation.max_new_tokens=4"]
    history = [row for row in run(run_config("grpo", *keys)).history if "train/reward" in row]
    assert all((row["train/failed_episodes"], row["train/episode_turns"]) == (0.0, 1.0) for row in history)
    assert 0.4 < sum(row["train/reward"] for row in history) / len(history) < 0.6
    said = {message["data"]["word"] for message in log if message["type"] == "step"}
    rows = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert {row["completion"] for row in rows} <= said


SERVER = """
import random, sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Word(Action):
    message: str

class Hint(Observation):
    hint: str

class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number, self.turns = random.Random(seed).randrange(10), 0
        return Hint(hint="guess", done=False, reward=None)

    def step(self, action, **kwargs):
        self.turns += 1
        if action.message == "break":
            raise ValueError("broken")
        if action.message == str(self.number):
            return Hint(hint="right", done=True, reward=1.0)
        return Hint(hint=f"wrong {self.turns}", done=False, reward=-0.125)

    @property
    def state(self):
        return State()

app = create_fastapi_app(Guess, Word, Hint, max_concurrent_envs=2)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def real(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "server.py").write_text(textwrap.dedent(SERVER))
    process = subprocess.Popen([PYTHON, "server.py", str(port)], cwd=tmp_path, env={"PATH": os.environ["PATH"]})
    try:
        end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end:
            with socket.socket() as link:
                if link.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"ws://127.0.0.1:{port}/ws"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(
    not Path(PYTHON).is_file(), reason="OPENENV_PYTHON is not the Python of an environment with openenv"
)
def test_a_real_server(real):
    """Six episodes at once on a server with room for two; the numbers are drawn here as they are there."""
    import random

    environment = make(real, observation="hint", connect_timeout=30.0, solved_reward=0.875)

    async def attempt(sample):
        number = random.Random(sample.metadata["seed"]).randrange(10)
        episode = environment.episode(sample, 0)
        try:
            (first,) = await episode.reset()
            wrong = await episode.step(says(str(number + 1)))
            right = await episode.step(says(str(number)))
            return first["content"], texts(wrong), wrong.reward, right.reward, right.done, right.metrics["accuracy"]
        finally:
            await episode.close()

    async def attempts():
        return await asyncio.gather(*map(attempt, environment.samples("train")))

    assert asyncio.run(attempts()) == [("guess", ["wrong 1"], -0.125, 1.0, True, 1.0)] * 6
    sample = environment.samples("train")[0]
    with pytest.raises(RLFrameworkError, match=r"answered step with the error broken \(sample 'seed \d+', turn 1\)"):
        play(environment, sample, [says("break")])
    with pytest.raises(RLFrameworkError, match=r"field 'word' alone.*Field required.*turn 1"):
        play(make(real, action="word", observation="hint"), sample, [says("a")])

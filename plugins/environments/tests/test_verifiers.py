"""verifiers in a process of its own: with a double of the package, and with the real one in its environment."""

import asyncio
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from rlframework import run
from rlframework.base.errors import ConfigError, RLFrameworkError
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.environment import AgentSession
from rlframework_environments.config import VerifiersConfig
from rlframework_environments.verifiers import VerifiersEnvironment

pytestmark = pytest.mark.slow

PYTHON = os.environ.get("VERIFIERS_PYTHON", "")
SESSION = AgentSession("http://127.0.0.1:9/v1", "key", "policy", "1")


@pytest.fixture
def python(tmp_path, monkeypatch):
    """A Python with the double of verifiers; the current directory is that of the test."""
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "packages/verifiers/v1"
    (package / "utils").mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("verifiers_double.py"), package / "utils/loaders.py")
    (package / "clients.py").write_text("from verifiers.v1.utils.loaders import EvalClientConfig, ModelContext\n")
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={package.parents[1]} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def make(python):
    """`make(*prompts)`: an environment with these tasks, the first of which is held out."""
    made = []

    def make(*prompts, **keys):
        keys = {"python": python, "settings": {"taskset": {"prompts": ["held out", *prompts]}}, **keys}
        made.append(VerifiersEnvironment(VerifiersConfig(validation_samples=1, **keys), seed=0))
        return made[-1]

    yield make
    for environment in made:
        environment.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name == "verifiers"]


def attempt(environment):
    """The outcome of the first task's attempt."""
    return asyncio.run(environment.run_agent(environment.samples("train")[0], SESSION))


def wait_for(path):
    end = time.monotonic() + 60
    while not Path(path).exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_tasks_are_split(make):
    environment = make("a", "b", "c", train_samples=2)
    assert [sample.messages for sample in environment.samples("train")] == [
        ({"role": "user", "content": "a"},), ({"role": "user", "content": "b"},)
    ]  # fmt: skip
    assert [sample.id for sample in environment.samples("validation")] == ["task held out"]
    environment.shutdown()
    assert Path("served").exists()  # it was left, not killed


def test_the_reward_is_the_mean_of_the_agents_that_train(make):
    outcome = attempt(make("means"))
    assert (outcome.reward, dict(outcome.metrics)) == (0.75, {"turns": 3.5, "right": 0.75})


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("breaks", "SandboxError: no sandbox"),
        ("raises", "RuntimeError: broken"),
        ("runs_nobody", "no agent has run to its end"),
        ("shares", "the agent 'solver' does not train the model, but uses it; set its client in settings"),
        ("asks", "URLError"),
    ],
)
def test_an_attempt_that_fails(make, task, problem):
    environment = make(task, "means")
    with pytest.raises(RLFrameworkError, match=problem):
        attempt(environment)
    other = environment.run_agent(environment.samples("train")[1], SESSION)
    assert asyncio.run(other).reward == 0.75


def test_an_attempt_is_cancelled(make):
    environment = make("hangs")

    async def cancelled():
        task = asyncio.ensure_future(environment.run_agent(environment.samples("train")[0], SESSION))
        await asyncio.to_thread(wait_for, "hanging")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    wait_for("cancelled")


def test_a_process_that_ends_is_started_again(make):
    environment = make("ends", "means")
    with pytest.raises(
        RLFrameworkError, match=r"'.*/python' \(environment.python\) has ended. It wrote:\n(.*\n)*out of"
    ):
        attempt(environment)
    assert asyncio.run(environment.run_agent(environment.samples("train")[1], SESSION)).reward == 0.75


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"settings": {}}, "does not load environment.settings: ValueError: taskset.id is missing"),
        ({"python": "/nowhere/python"}, "did not start: .*has ended. It wrote:\n/nowhere/python: No such file"),
        ({"python": sys.executable}, "does not load environment.settings: ModuleNotFoundError: .*'verifiers'"),
        ({"python": shutil.which("sleep")}, "did not start: "),
        ({"settings": {"taskset": {"prompts": ["a"]}}}, "has 1 tasks, and environment.validation_samples=1 are held"),
    ],
)
def test_an_environment_that_cannot_be_used(make, keys, problem):
    with pytest.raises(ConfigError, match=problem):
        make("a", **keys).samples("train")


def test_a_start_that_takes_too_long(make, monkeypatch, tmp_path):
    monkeypatch.setattr("rlframework_environments.verifiers._END_SECONDS", 0.5)  # it does not end by itself
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    with pytest.raises(ConfigError, match=r"did not answer within 0.5 s \(environment.start_timeout\)"):
        make("a", python=str(slow), start_timeout=0.5).samples("train")


def test_a_system_prompt_is_the_tasksets():
    with pytest.raises(ValidationError, match="give the taskset a system prompt"):
        VerifiersConfig(python="python", settings={}, system_prompt="Think.")


def test_only_named_variables_are_passed(make, monkeypatch):
    monkeypatch.setenv("SECRET", "kept")
    monkeypatch.setenv("GIVEN", "x")
    environment = make("variables", variables=("GIVEN",))
    assert dict(attempt(environment).metrics) == {"GIVEN": 1.0, "SECRET": 0.0, "right": 0.0}


WORDS = """
import verifiers.v1 as vf

class WordData(vf.TaskData):
    answer: str

class WordTask(vf.Task[WordData, vf.State]):
    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        text = "".join(str(m.content or "") for m in trace.messages if m.role == "assistant")
        return sum(letter.isdigit() for letter in text) / max(len(text), 1)

class Words(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        return [WordTask(WordData(prompt=f"{n}, say 3=", answer="3"), self.config.task) for n in range(10)]

__all__ = ["Words"]
"""


def train(run_config, tmp_path, steps, **keys):
    """GRPO on an environment; return the metrics of its steps, and the samples."""
    letters = "".join(map(chr, range(32, 127))) + "\n"
    model = make_llama(tmp_path / "m", character_tokenizer(letters), hidden=16, layers=1, heads=2, max_positions=2048)
    chosen = json.dumps({"name": "verifiers", "validation_samples": 2, **keys})
    config = run_config(
        "grpo", "~environment", f"environment={chosen}", f"algorithm.num_steps={steps}", "policy.batching.tokens=2048",
        f"policy.model_name={model}", "generation.max_new_tokens=4",
    )  # fmt: skip
    history = [row for row in run(config).history if "train/reward" in row]
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    return history, samples


def check(history, samples):
    """Each sample's reward is that of its turns, which are trained on as they were sampled."""
    assert all(row["train/failed_episodes"] == 0.0 for row in history)
    assert all(row["train/generation_logprob_difference_max"] < 1e-4 for row in history)
    trained = {turn["role"] for sample in samples for turn in sample["turns"] if turn["trained"]}
    assert trained == {"assistant"}
    for sample in samples:
        text = "".join(turn["content"] for turn in sample["turns"] if turn["role"] == "assistant")
        assert sample["reward"] == pytest.approx(sum(letter.isdigit() for letter in text) / max(len(text), 1))


def test_a_run(run_config, tmp_path, python):
    check(
        *train(run_config, tmp_path, 2, python=python, settings={"taskset": {"prompts": [f"{n}=" for n in range(8)]}})
    )


@pytest.mark.skipif(
    not Path(PYTHON).is_file(), reason="VERIFIERS_PYTHON is not the Python of an environment with verifiers"
)
def test_a_run_with_the_real_package(run_config, tmp_path, monkeypatch):
    """Its own chat loop, a program of its own for each attempt, talks to the run's endpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.py").write_text(WORDS)
    settings = {"taskset": {"id": "words"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
    history, samples = train(run_config, tmp_path, 1, python=PYTHON, settings=settings)
    check(history, samples)
    assert samples[0]["turns"][0]["content"].endswith(", say 3=")
    assert "train/reward/digits" in history[0]

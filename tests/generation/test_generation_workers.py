"""Runs with generation workers train exactly like runs that generate in the trainer's process."""

from __future__ import annotations

import os
import re
import signal
import site
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rlframework import run
from rlframework.base.errors import ConfigError, WorkerLost
from rlframework.generation.engine_starter import EngineStarter
from rlframework.generation.remote import RemoteGeneration
from rlframework.plugins.manager import create_manager
from rlframework.runner.restarts import RESTARTS_FILE

pytestmark = pytest.mark.slow

OPTIONS = ("algorithm.num_steps=2", "policy.optimizer.lr=1e-2")
APART = ("generation.workers.group=processes",)


@pytest.fixture
def alone(run_config, tmp_path):
    """A run that generates in the trainer's process."""
    return run(run_config("grpo", f"output_dir={tmp_path}/alone", *OPTIONS))


def require_the_same(result, alone):
    for here, there in zip(result.history, alone.history, strict=True):
        for name in ("train/reward", "train/loss", "train/grad_norm", "validation/accuracy", "validation/reward"):
            if name in there:
                assert here[name] == pytest.approx(there[name], rel=1e-4, abs=1e-6), (name, here["step"])


@pytest.mark.parametrize("transport", ["ipc", "collective"])
def test_separate_engines_give_the_numbers_of_the_embedded_one(run_config, tmp_path, alone, transport):
    """Rewards, losses and validation agree, so each rollout used the weights of its step; refit times are metrics.

    The first step generates with the weights that the validation before it received.
    """
    options = (*OPTIONS, *APART, "generation.workers.num_workers=2", f"generation.refit.transport={transport}")
    result = run(run_config("grpo", f"output_dir={tmp_path}/apart", *options))
    require_the_same(result, alone)
    assert [metrics.get("time/refit", 0.0) > 0 for metrics in result.history] == [False, False, True]
    assert [metrics.get("validation/refit_seconds", 0.0) > 0 for metrics in result.history] == [True, False, True]
    assert result.history[-1]["refit/mb"] > 0
    assert "time/refit" not in alone.history[-1]


@pytest.fixture
def other_python(tmp_path) -> str:
    """The Python of another environment, which finds this one's packages through a `.pth` file."""
    folder = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (own,) = folder.glob("lib/python*/site-packages")
    packages = [*site.getsitepackages(), *(path for path in sys.path if path.endswith("site-packages"))]
    lines = [f"import site; site.addsitedir({path!r})" for path in dict.fromkeys(packages)]
    (own / "others.pth").write_text("\n".join(lines) + "\n")
    return str(folder / "bin" / "python")


@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("ray_session")
@pytest.mark.thorough
def test_an_engine_in_another_python_environment(run_config, tmp_path, alone, other_python):
    """Ray starts it with that environment's Python; memory is still shared."""
    from rlframework.runner.parts import build_parts

    options = (*OPTIONS, "generation.workers.group=ray", f"generation.workers.python={other_python}")
    config = run_config("grpo", f"output_dir={tmp_path}/elsewhere", *options)
    with build_parts(config) as parts:
        assert parts.generation.refit().transport == "ipc"
        (info,) = parts.generation.client.engines[0].call("get_info")
        assert Path(info["python"]) == Path(other_python)
        assert Path(info["python"]) != Path(sys.executable)
        from rlframework.algorithms.grpo import GRPO

        require_the_same(GRPO(parts).run(), alone)


@pytest.fixture
def parts(run_config):
    from rlframework.runner.parts import build_parts

    with build_parts(run_config("grpo", *APART, "generation.refit.deadline=60")) as made:
        made.generation.prepare_for_generation()
        yield made


def pid_of(generation, index: int = 0) -> int:
    return int(generation.client.engines[index].call("get_info")[0]["pid"])


def test_probes_are_no_longer_than_the_engine_takes(parts):
    """As with `generation.vllm.max_model_len`; the model has 64 positions."""
    generation, config = parts.generation, parts.config
    record = create_manager().select("generation_engine", "transformers").record
    for longest, expected in ((None, 64), (lambda _: None, 64), (lambda _: 20, 20), (lambda _: 2000, 64)):
        probes = generation._probes(config, parts.tokenizer, replace(record, longest_row=longest))
        requests = probes.of_version(1).requests
        assert max(len(request.prompt_ids) + request.max_new_tokens for request in requests) == expected


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_an_engine_that_hangs_or_died_is_replaced_by_the_refit(parts, monkeypatch, number):
    first, refitter = pid_of(parts.generation), parts.generation.refitter
    monkeypatch.setattr(refitter, "_config", refitter._config.model_copy(update={"deadline": 8.0}))
    os.kill(first, number)
    parts.generation.pop_metrics()
    assert parts.generation.refit().version == parts.generation.refitter.require_committed()
    assert pid_of(parts.generation) != first
    assert not psutil.pid_exists(first)
    assert parts.generation.pop_metrics()["generation/lost_engines"] == 1


def test_a_replacement_that_cannot_start_is_an_error_with_the_name_of_the_engine(parts, monkeypatch):
    def cannot_start(_starter, _index):
        raise RuntimeError("no room")

    monkeypatch.setattr(EngineStarter, "_start_one", cannot_start)
    os.kill(pid_of(parts.generation), signal.SIGKILL)
    expected = "generation engine 0 was lost, and the start of another in its place has failed: no room"
    with pytest.raises(WorkerLost, match=expected):
        parts.generation.refit()


def test_a_replacement_that_starts_after_the_end_is_shut_down(parts, monkeypatch):
    may_start, ended = threading.Event(), threading.Event()

    def start_late(_starter, _index):
        may_start.wait(300)
        return SimpleNamespace(shutdown=ended.set)

    monkeypatch.setattr(EngineStarter, "_start_one", start_late)
    os.kill(pid_of(parts.generation), signal.SIGKILL)
    with pytest.raises(WorkerLost):
        pid_of(parts.generation)
    parts.generation._replace_lost()
    assert parts.generation.shutdown()
    assert not ended.is_set()
    may_start.set()
    assert ended.wait(300)


@pytest.mark.parametrize(
    ("group", "option", "message"),
    [
        ("inline", "workers.num_workers=2", "a single engine"),
        ("inline", "refit.transport=collective", "needs several processes"),
        ("processes", "workers.python=/usr/bin/python3", r"generation\.workers\.python.*ray"),
    ],
)
def test_groups_that_cannot_run_the_engines_are_rejected(run_config, group, option, message):
    with pytest.raises(ConfigError, match=message):
        run_config("grpo", f"generation.workers.group={group}", f"generation.{option}")


def test_a_backend_that_sends_no_weights_is_rejected(run_config):
    from rlframework.plugins.check import check_config

    config = run_config("grpo", *APART, "generation.refit.transport=ipc")
    registered = create_manager().select("policy_worker", "dtensor")
    bare = replace(registered, record=replace(registered.record, capabilities=frozenset()))
    keys = {problem.key for problem in check_config(config, bare, "cpu") if problem.undeclared}
    assert "generation.refit.transport" in keys


def test_an_engine_that_receives_no_weights_is_rejected(run_config):
    from rlframework.plugins.check import check_config

    config = run_config("grpo", *APART)
    registered = create_manager().select("generation_engine", "transformers")
    assert check_config(config, registered, "cpu") == []
    bare = replace(registered, record=replace(registered.record, capabilities=frozenset()))
    (problem,) = check_config(config, bare, "cpu")
    assert problem.undeclared
    assert "does not declare collective_refit or ipc_refit" in problem.message


def kill_during_generation(monkeypatch, *, call: int, index: int = 0) -> None:
    """Kill an engine that has its requests of the rollout number `call`, but can finish none of them."""
    ordinary, calls = RemoteGeneration.generate, []

    def deadly(self, *args, **kwargs):
        calls.append(self)
        if len(calls) != call:
            return ordinary(self, *args, **kwargs)
        pid = pid_of(self, index)
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        return ordinary(self, *args, **kwargs)

    monkeypatch.setattr(RemoteGeneration, "generate", deadly)


def test_the_loss_of_an_engine_costs_its_unfinished_tokens_and_nothing_else(run_config, tmp_path, monkeypatch, caplog):
    """The other engine completes its requests, the next refit replaces it; the numbers are those of all engines."""
    options = (*OPTIONS, *APART, "generation.workers.num_workers=2", "algorithm.validation.at_start=false")
    whole = run(run_config("grpo", f"output_dir={tmp_path}/whole", *options))
    kill_during_generation(monkeypatch, call=1, index=1)
    result = run(run_config("grpo", f"output_dir={tmp_path}/lost", *options))
    for here, there in zip(result.history, whole.history, strict=True):
        for name in ("train/reward", "train/loss", "train/grad_norm", "validation/accuracy", "validation/reward"):
            assert here.get(name) == there.get(name), (name, here["step"])
    assert sum(metrics.get("generation/lost_engines", 0) for metrics in result.history) == 1
    assert not any("generation/lost_engines" in metrics for metrics in whole.history)
    assert not (tmp_path / "lost" / RESTARTS_FILE).exists()
    [told] = [message for message in caplog.messages if "was lost" in message]
    assert re.fullmatch(r"generation engine 1 was lost, and is replaced: the process of rank 0 .* SIGKILL.*", told)

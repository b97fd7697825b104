"""Runs with generation workers train exactly like runs that generate in the trainer's process."""

from __future__ import annotations

import os
import signal
import site
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlframework import run
from rlframework.errors import ConfigError, DeadlineExceeded, WorkerLost
from rlframework.generation.driver import RemoteGeneration
from rlframework.plugins.manager import create_manager
from rlframework.runner.launch import RESTARTS_FILE

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


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("ray_session")
def test_an_engine_in_another_python_environment(run_config, tmp_path, alone, other_python):
    """Ray starts it with that environment's Python; memory is still shared."""
    from rlframework.runner.parts import build_parts

    options = (*OPTIONS, "generation.workers.group=ray", f"generation.workers.python={other_python}")
    config = run_config("grpo", f"output_dir={tmp_path}/elsewhere", *options)
    with build_parts(config) as parts:
        assert parts.generation.refitter.transport == "ipc"
        group = parts.generation.worker_group
        (info,) = group.get_all_worker_results(group.run_all_workers_single_data("get_info"))
        assert Path(info["python"]) == Path(other_python)
        assert Path(info["python"]) != Path(sys.executable)
        from rlframework.algorithms.grpo import GRPO

        require_the_same(GRPO(parts).run(), alone)


@pytest.fixture
def parts(run_config):
    from rlframework.runner.parts import build_parts

    with build_parts(run_config("grpo", *APART, "generation.refit.deadline=2.5")) as made:
        made.generation.prepare_for_generation()
        yield made


def engine_of(parts) -> int:
    group = parts.generation.worker_group
    return int(group.get_all_worker_results(group.run_all_workers_single_data("get_info"))[0]["pid"])


def test_weights_are_sent_when_they_are_stale_and_not_again(parts):
    assert parts.generation.pop_metrics()["refit/mb"] > 0
    parts.generation.prepare_for_generation()
    assert parts.generation.pop_metrics() == {}
    parts.generation.refit()
    assert parts.generation.pop_metrics()["time/refit"] > 0


def test_a_hanging_engine_is_reported_within_the_deadline_and_the_trainer_survives(parts):
    os.kill(engine_of(parts), signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"within 2\.5 s"):
        parts.generation.refit()
    assert time.monotonic() - begun < 10
    assert parts.policy.get_info()[0]["rank"] == 0


def test_an_engine_that_died_is_a_lost_worker(parts):
    os.kill(engine_of(parts), signal.SIGKILL)
    with pytest.raises(WorkerLost, match="SIGKILL"):
        parts.generation.refit()
    assert parts.policy.get_info()[0]["rank"] == 0


def test_a_backend_without_offload_refits_its_engines(run_config, tmp_path):
    """`ddp` does not declare `cpu_offload`; with engines in processes of their own its numbers stay the same."""
    ddp = ("policy.backend=ddp", "generation.workers.num_workers=1", *OPTIONS)
    embedded = run(run_config("grpo", f"output_dir={tmp_path}/embedded", "policy.backend=ddp", *OPTIONS))
    result = run(run_config("grpo", f"output_dir={tmp_path}/ddp", *ddp, *APART))
    require_the_same(result, embedded)
    assert result.history[-1]["refit/mb"] > 0


def test_one_engine_fits_into_the_drivers_process(run_config, tmp_path, alone):
    result = run(run_config("grpo", f"output_dir={tmp_path}/inline", *OPTIONS, "generation.workers.group=inline"))
    require_the_same(result, alone)


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


def test_a_run_that_lost_an_engine_resumes_from_its_checkpoint(run_config, tmp_path, monkeypatch, caplog):
    """With `fault_tolerance`: new workers, new engines, and the same steps as an undisturbed run."""
    steps = ("algorithm.num_steps=3", "algorithm.validation={at_start: false, at_end: false}", "checkpoints.every=1")
    options = (*OPTIONS, *APART, *steps, "fault_tolerance={max_restarts: 1, backoff: 0.01}")
    whole = run(run_config("grpo", f"output_dir={tmp_path}/whole", *options))
    ordinary, calls = RemoteGeneration.prepare_for_generation, []

    def deadly(self):
        calls.append(self)
        if len(calls) == 3:
            os.kill(engine_of(SimpleNamespace(generation=self)), signal.SIGKILL)
        return ordinary(self)

    monkeypatch.setattr(RemoteGeneration, "prepare_for_generation", deadly)
    result = run(run_config("grpo", f"output_dir={tmp_path}/lost", *options))
    assert result.metrics["step"] == 3
    for name in ("train/reward", "train/loss", "train/grad_norm"):
        assert result.metrics[name] == whole.metrics[name], name
    assert (tmp_path / "lost" / RESTARTS_FILE).read_text().count("WorkerLost") == 1
    assert "it cannot be restarted" not in caplog.text

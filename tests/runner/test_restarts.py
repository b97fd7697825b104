"""Training restarts after the loss of a worker, and ends with the weights of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from probe_runs import assert_same_run, rows_of

from rlframework import run
from rlframework.algorithms.algorithm import RunResult
from rlframework.algorithms.checkpoints import checkpoints_in
from rlframework.base.errors import (
    ConfigError,
    DeadlineExceeded,
    NonFiniteGradients,
    RunTerminated,
    WorkerError,
    WorkerLost,
)
from rlframework.plugins.configure import config_yaml
from rlframework.policy.client import Policy
from rlframework.runner.launch import resume
from rlframework.runner.restarts import RESTARTS_FILE, Attempt, run_with_restarts

pytestmark = pytest.mark.slow

RAY_OF_ITS_OWN = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "of-this-test",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "300",
}
"""Ray checks each machine every 3 s, and counts it as lost after five consecutive failures. The timeout of a check is
the default, so that a slow machine is not taken for a lost one."""
TWO = ("worker_group={name: processes, num_workers: 2}", "policy.batching.tokens=1024")
"""With one microbatch per step and worker, the n-th call of the loss is in the n-th step."""


@pytest.fixture
def plan(tmp_path: Path):
    """`plan("1-5-kill", ...)`: the failures, as rank, call of the loss, and kind."""

    def make(*words: str) -> str:
        folder = tmp_path / "plan"
        folder.mkdir(exist_ok=True)
        for word in words:
            (folder / word).touch()
        return f"algorithm.loss={{name: 'probe_losses:Deadly', plan: {folder}}}"

    return make


def options(out: Path, *more: str) -> list[str]:
    fast = "fault_tolerance={max_restarts: 2, backoff: 0.01}"
    steps = ["algorithm.num_steps=6", "algorithm.validation.every=3", "checkpoints.every=2"]
    return [f"output_dir={out}", *steps, fast, *TWO, *more]


@pytest.fixture(scope="module")
def whole(make_config, tmp_path_factory) -> Path:
    """The undisturbed run, shared by all tests."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "plan").mkdir()
    loss = f"algorithm.loss={{name: 'probe_losses:Deadly', plan: {folder / 'plan'}}}"
    run(make_config(folder, "sft", *options(folder / "whole", loss)))
    return folder / "whole"


def assert_same(left: Path, right: Path) -> None:
    assert_same_run(left, right)
    assert [row["step"] for row in rows_of(right)] == [0, 1, 2, 3, 4, 5, 6]


def test_a_killed_worker_is_replaced_and_the_weights_are_those_of_an_undisturbed_run(
    run_config, tmp_path, whole, plan, caplog
):
    assert not (whole / RESTARTS_FILE).exists()
    result = run(run_config("sft", *options(tmp_path / "run", plan("1-4-kill"))))
    assert_same(whole, tmp_path / "run")
    assert result.metrics["step"] == 6
    [told] = rows_of(tmp_path / "run" / RESTARTS_FILE)
    assert {key: told[key] for key in ("restart", "of", "from_step", "reached_step", "waited")} == {
        "restart": 1,
        "of": 2,
        "from_step": 2,
        "reached_step": 3,
        "waited": 0.01,
    }
    assert told["error"].startswith(
        "WorkerLost: the process of rank 1 of 2 died in train: its process ended (killed by"
    )
    line = f"restart 1 of 2 from {tmp_path / 'run' / 'checkpoints' / 'step-000002'}, in 0.01 s: the process of rank 1"
    assert line in caplog.text
    assert len(json.loads((tmp_path / "run" / "environment.json").read_text())["earlier"]) == 1
    assert len({row["step"] for row in rows_of(tmp_path / "run" / "samples.jsonl")}) == len(
        {row["step"] for row in rows_of(whole / "samples.jsonl")}
    )
    assert len(rows_of(tmp_path / "run" / "samples.jsonl")) == len(rows_of(whole / "samples.jsonl"))


@pytest.mark.thorough
def test_without_a_checkpoint_it_starts_from_the_beginning(run_config, tmp_path, whole, plan, caplog):
    run(run_config("sft", *options(tmp_path / "run", plan("0-2-kill"), "checkpoints.every=0")))
    assert_same(whole, tmp_path / "run")
    errors = caplog.text
    assert "note: fault_tolerance.max_restarts=2, but checkpoints.every=0, so a restart repeats the whole run" in errors
    assert "restart 1 of 2 from the beginning, as there is no checkpoint, in 0.01 s: " in errors
    [told] = rows_of(tmp_path / "run" / RESTARTS_FILE)
    assert (told["from_step"], told["reached_step"]) == (0, 1)


@pytest.mark.thorough
def test_a_resumed_run_restarts_from_its_checkpoint(run_config, tmp_path, whole, plan):
    run(
        run_config(
            "sft", *options(tmp_path / "run", plan()), "algorithm.num_steps=2", "algorithm.validation.at_end=false"
        )
    )
    plan("0-1-kill")
    resume(tmp_path / "run", ["algorithm.num_steps=6", "algorithm.validation.at_end=true"], trust_run=True)
    assert_same(whole, tmp_path / "run")
    assert [told["from_step"] for told in rows_of(tmp_path / "run" / RESTARTS_FILE)] == [2]


@pytest.mark.thorough
def test_a_worker_that_hangs_after_a_step_is_lost(run_config, tmp_path, whole, plan):
    run(run_config("sft", *options(tmp_path / "run", plan("1-4-hang")), "worker_group.deadlines.call=20"))
    assert_same(whole, tmp_path / "run")
    assert [told["error"].partition(":")[0] for told in rows_of(tmp_path / "run" / RESTARTS_FILE)] == [
        "DeadlineExceeded"
    ]


def test_an_interrupted_run_does_not_restart(run_config, tmp_path, plan, monkeypatch):
    """SIGTERM arrives in the third step, which loses a worker: a scheduler signals all processes of a job."""
    real, calls = Policy.train, []

    def train(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(self.worker_group._pids[1][0], signal.SIGKILL)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Policy, "train", train)
    with pytest.raises(RunTerminated, match="interrupted before the end of the step: the process of rank 1") as caught:
        run(run_config("sft", *options(tmp_path / "run", plan())))
    assert caught.value.exit_code == 143
    assert not (tmp_path / "run" / RESTARTS_FILE).exists()
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == ["step-000002"]


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("ray")
def test_a_machine_that_leaves_a_cluster_is_replaced_by_another(run_config, tmp_path, whole, plan):
    """Three machines, two workers: the third machine replaces the one whose Ray is killed."""
    ray = "worker_group={name: ray, num_workers: 2, workers_per_node: 1}"
    config = run_config("sft", *options(tmp_path / "run", plan("1-4-node")), ray, "policy.batching.tokens=1024")
    (tmp_path / "run.yaml").write_text(config_yaml(config))
    here = Path(__file__).parents[1] / "fixtures"
    done = subprocess.run(
        [sys.executable, str(here / "probe_run_on_cluster.py"), "3", str(tmp_path / "run.yaml")],
        env=os.environ | RAY_OF_ITS_OWN,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert_same(whole, tmp_path / "run")
    told = rows_of(tmp_path / "run" / RESTARTS_FILE)
    assert [(one["from_step"], one["reached_step"]) for one in told] == [(2, 3)]


# -- how often, and after how long: attempts that are made up ----------------------------------------------------------


class Done:
    """Stands in for observers with this `last_step`."""

    def __init__(self, last_step: int) -> None:
        self.last_step = last_step


@pytest.fixture
def tried(run_config, tmp_path):
    """`tried(outcomes, **fault_tolerance)`: what the attempts were, the waits, and the result or error.

    An outcome is the error, the last step of that attempt (None: training did not begin), and the checkpoint it wrote.
    """

    def go(outcomes, **section):
        (tmp_path / "run").mkdir()
        config = run_config("sft", f"fault_tolerance={json.dumps(section)}", "checkpoints.every=1", *TWO)
        attempts: list[Attempt] = []
        waits: list[float] = []

        def attempt(now: Attempt) -> RunResult:
            attempts.append(now)
            error, last, checkpoint = outcomes[len(attempts) - 1]
            now.observers = None if last is None else Done(last)
            if checkpoint:
                (config.output_dir / "checkpoints" / f"step-{checkpoint:06d}").mkdir(parents=True)
            if error is not None:
                raise error
            return RunResult({"step": float(last)})

        try:
            end = run_with_restarts(config, attempt, wait=waits.append)
        except Exception as error:  # noqa: BLE001 - what came of it is the answer
            end = error
        return [now.checkpoint and now.checkpoint.name for now in attempts], waits, end

    return go


def lost(last=3, checkpoint=0):
    return WorkerLost("gone"), last, checkpoint


DONE = (None, 6, 0)
TOO_FEW = (ConfigError("too few GPUs"), None, 0)
"""A start that fails: after the loss of a node there may be too few GPUs for a while."""


def slow(last):
    return DeadlineExceeded("slow"), last, 0


@pytest.mark.parametrize(
    ("outcomes", "section", "waited", "checkpoints"),
    [
        ([lost()] * 5 + [DONE], {"max_restarts": 5, "max_backoff": 6.0}, [1.0, 2.0, 4.0, 6.0, 6.0], [None] * 6),
        ([lost(), lost(checkpoint=4), lost(), DONE], {}, [1.0, 1.0, 2.0], [None, None, "step-000004", "step-000004"]),
        ([lost(), TOO_FEW, DONE], {}, [1.0, 2.0], [None] * 3),
        ([slow(1), DONE], {}, [1.0], [None] * 2),
        ([slow(0)], {}, [], [None]),
    ],
    ids=[
        "the backoff doubles up to its maximum",
        "a new checkpoint resets the count",
        "a failed start of a restart is repeated",
        "a deadline counts where a step was done in time before",
        "and not in the first step",
    ],
)
def test_attempts_and_waits(tried, outcomes, section, waited, checkpoints):
    starts, waits, end = tried(outcomes, **({"max_restarts": 2, "backoff": 1.0} | section))
    assert (starts, waits) == (checkpoints, waited)
    assert isinstance(end, RunResult) == (outcomes[-1] is DONE)


def test_restarts_in_a_row_are_limited(tried, caplog):
    error = WorkerLost("the third")
    starts, _, end = tried([lost(), lost(), (error, 3, 0)], max_restarts=2, backoff=1.0)
    assert end is error
    assert len(starts) == 3
    assert "giving up after 2 restart(s) in a row without a new checkpoint (fault_tolerance.max_restarts)" in (
        caplog.text
    )


@pytest.mark.parametrize("checkpoint", [0, 3])
def test_without_restarts_a_lost_worker_shows_the_command_that_continues(tried, tmp_path, caplog, checkpoint):
    _, _, end = tried([lost(checkpoint=checkpoint)])
    assert isinstance(end, WorkerLost)
    assert (f"`rlframework train --resume {tmp_path / 'run'}` continues there" in caplog.text) == bool(checkpoint)


@pytest.mark.parametrize(
    ("error", "last", "allowed"),
    [(ConfigError("a"), 3, 2), (NonFiniteGradients("b"), 3, 2), (WorkerError("c"), 3, 2), (ValueError("d"), 3, 2),
     (WorkerLost("off by default"), 3, 0), (WorkerLost("died while it started"), None, 2)],
)  # fmt: skip
def test_what_is_not_the_loss_of_a_worker_after_the_start_ends_the_run(tried, error, last, allowed):
    starts, waits, end = tried([(error, last, 0)], **({"max_restarts": allowed} if allowed else {}))
    assert (end, waits, len(starts)) == (error, [], 1)


def test_secrets_in_an_error_are_not_recorded(tried, tmp_path, caplog):
    error = WorkerLost("died reading https://me:hunter2@host/data\nhf_abcdefghijklmnopqrstuvwxyz")
    tried([(error, 2, 0), (None, 6, 0)], max_restarts=1, backoff=1.0)
    written = (tmp_path / "run" / RESTARTS_FILE).read_text() + caplog.text
    assert "died reading https://***@host/data" in written
    assert "hunter2" not in written
    assert "hf_abc" not in written


def test_inline_has_nothing_to_restart(run_config, tmp_path, caplog):
    run_with_restarts(run_config("sft", "fault_tolerance.max_restarts=1"), lambda now: RunResult({}))
    assert "worker_group.name=inline runs its worker in this process, so it cannot be restarted" in caplog.text

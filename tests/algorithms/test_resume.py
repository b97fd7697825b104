"""A resumed run has the numbers of an uninterrupted one."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from probe_runs import assert_same_run, begin, numbers_of, rows_of, wait_for
from safetensors.torch import load_file

from rlframework import run
from rlframework.algorithms.checkpoints import checkpoints_in, step_of_checkpoint
from rlframework.base.errors import ConfigError, RunTerminated, UserError
from rlframework.base.files import exclusive_directory
from rlframework.runner.launch import resume

pytestmark = pytest.mark.slow


def overrides(out: Path, *more: str) -> list[str]:
    return [f"output_dir={out}", "algorithm.num_steps=6", "algorithm.validation.every=3", "checkpoints.every=2", *more]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


CURRICULUM = [
    "algorithm.curriculum={skip_epochs: 1}",
    "algorithm.prompts_per_step=16",
    "algorithm.samples_per_prompt=2",
]
EPISODES = [
    "generation.max_new_tokens=6", "generation.stop_token_ids=[8, 9, 10, 11, 12, 13]", 'plugins=["probe_games"]',
    "~environment",
    "environment={name: two_turns, max_episode_tokens: 24, fails: 3, gather_timeout: 20}",
]  # fmt: skip
REFERENCE = ["algorithm.loss.kl_coef=0.5", "algorithm.reference_sync={steps: 2, alpha: 0.6}"]
IN_SHARDS = ["checkpoints={every: 2, format: sharded, asynchronous: true}"]
PPO = ["algorithm.name=ppo", "algorithm.samples_per_prompt=1", "algorithm.prompts_per_step=32"]
PPO += ["critic={scheduler: {name: linear, total_steps: 6}}"]


@pytest.mark.parametrize(
    ("algorithm", "keys", "shown"),
    [
        pytest.param("sft", [], "train/loss", id="supervised", marks=pytest.mark.thorough),
        pytest.param("grpo", [], "train/reward", id="grpo"),
        pytest.param("grpo", CURRICULUM, "train/prompts_skipped", id="a curriculum"),
        pytest.param("grpo", EPISODES, "train/failed_episodes", id="episodes that fail"),
        pytest.param("grpo", REFERENCE, "train/reference_synced", id="a reference that moves"),
        pytest.param("grpo", [*REFERENCE, *IN_SHARDS], "train/reference_synced", id="a reference in shards"),
        pytest.param("grpo", PPO, "train/value", id="a critic", marks=pytest.mark.thorough),
    ],
)
def test_resuming_from_a_checkpoint_gives_the_same_numbers(run_config, tmp_path, algorithm, keys, shown):
    """And the same weights; `shown` is a metric of what is special, so it is not 0 in each step."""
    more = ["policy.scheduler={name: cosine, warmup_steps: 2, total_steps: 6}", *keys]
    run(run_config(algorithm, *overrides(tmp_path / "whole", *more)))
    run(run_config(algorithm, *overrides(tmp_path / "two", *more), "algorithm.num_steps=4"))
    resume(tmp_path / "two", ["algorithm.num_steps=6"])
    whole, two = numbers_of(tmp_path / "whole"), numbers_of(tmp_path / "two")
    del two[4], whole[4]  # the last step of the shorter run has a validation that the other has not
    assert whole == two
    assert any(row.get(shown) for row in whole.values())
    for path in (tmp_path / "whole").glob("*/model.safetensors"):  # of the policy, and of a critic
        trained, resumed = load_file(path), load_file(tmp_path / "two" / path.parent.name / path.name)
        assert all(torch.equal(weight, resumed[name]) for name, weight in trained.items())
    environment = json.loads((tmp_path / "two" / "environment.json").read_text())
    assert environment["resumed"] == {"after_step": 4, "changed": {"algorithm.num_steps": [4, 6]}}


def test_steps_that_a_resume_repeats_are_in_the_files_once(run_config, tmp_path):
    """The checkpoint of step 4 is gone, as after a crash between a step and its checkpoint."""
    run(run_config("grpo", *overrides(tmp_path / "run"), "algorithm.num_steps=4", "checkpoints.keep_last=2"))
    samples = (tmp_path / "run" / "samples.jsonl").read_text()
    shutil.rmtree(checkpoints_in(tmp_path / "run")[-1])
    resume(tmp_path / "run")
    steps = [row["step"] for row in rows_of(tmp_path / "run" / "timeline.jsonl")]
    assert steps == [row["step"] for row in rows_of(tmp_path / "run")] == [0, 1, 2, 3, 4]
    assert (tmp_path / "run" / "samples.jsonl").read_text() == samples


def test_the_last_and_the_best_are_kept(run_config, tmp_path, caplog):
    keep = ["checkpoints.every=1", "checkpoints.keep_last=1", "checkpoints.keep_best=1"]
    keep += ["checkpoints.metric=train/loss", "checkpoints.best=lowest"]
    run(run_config("sft", *overrides(tmp_path / "run", *keep)))
    losses = {step: row["train/loss"] for step, row in numbers_of(tmp_path / "run").items() if "train/loss" in row}
    best = min((loss, step) for step, loss in losses.items())[1]
    kept = [int(path.name.removeprefix("step-")) for path in checkpoints_in(tmp_path / "run")]
    assert kept == sorted({best, 6})
    path = tmp_path / "run" / "checkpoints" / f"step-{best:06d}"
    assert (
        f"best checkpoint: {path}, with train/loss {losses[best]:.4g} (lowest); its model: rlframework" in caplog.text
    )


def test_keeping_the_best_by_a_metric_that_no_checkpoint_has_is_told(run_config, tmp_path, caplog):
    """Validation is after steps 3 and 6."""
    keep = ["checkpoints={every: 5, keep_best: 1}", "algorithm.num_steps=5", "algorithm.validation.at_end=false"]
    run(run_config("sft", *overrides(tmp_path / "run"), *keep))
    assert "checkpoints.keep_best=1 kept no checkpoint: none is of a step that has" in caplog.text
    assert "let checkpoints.every be a multiple of algorithm.validation.every, or name another metric" in caplog.text


def test_a_metric_counts_for_the_step_that_it_was_measured_at(run_config, tmp_path, caplog):
    """Validation is after steps 3 and 6: the checkpoints of 4 and 5 have no accuracy of their own.

    Those of 3 and 6 have the same, which the end of the run says.
    """
    keep = ["checkpoints.every=1", "checkpoints.keep_last=1", "checkpoints.keep_best=3"]
    run(run_config("sft", *overrides(tmp_path / "run", *keep)))
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == ["step-000003", "step-000006"]
    tie = "(highest, the last of 2 that are equal: another checkpoints.metric may tell them apart); its model"
    assert f"step-000006, with validation/accuracy 0 {tie}" in caplog.text


@pytest.mark.parametrize(("every", "written"), [(4, [4, 5]), (5, [5]), (9, [5]), (0, [])])
def test_the_last_step_has_a_checkpoint_too(run_config, tmp_path, every, written):
    run(run_config("sft", *overrides(tmp_path / "run"), "algorithm.num_steps=5", f"checkpoints.every={every}"))
    assert [step_of_checkpoint(path) for path in checkpoints_in(tmp_path / "run")] == written
    if written:
        resume(tmp_path / "run")  # has nothing to do
        assert list(numbers_of(tmp_path / "run")) == [0, 1, 2, 3, 4, 5]


def test_a_run_that_stops_early_has_a_checkpoint_of_its_last_step(run_config, tmp_path, monkeypatch):
    """A resume trains on only for a higher goal."""
    monkeypatch.setattr(
        "rlframework.algorithms.loop.validate", lambda parts, step, warned: ({"validation/accuracy": 0.1 * step}, [])
    )
    run(run_config("sft", *overrides(tmp_path / "run"), "algorithm.stop_at_accuracy=0.3"))
    assert [step_of_checkpoint(path) for path in checkpoints_in(tmp_path / "run")] == [2, 3]
    resume(tmp_path / "run")
    assert max(numbers_of(tmp_path / "run")) == 3
    resume(tmp_path / "run", ["algorithm.stop_at_accuracy=0.9"])
    assert max(numbers_of(tmp_path / "run")) == 6


def test_sigterm_before_the_first_step_releases_everything(run_config, tmp_path, monkeypatch):
    released = []

    @contextmanager
    def parts(*args, **kwargs):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            yield
        finally:
            released.append(True)

    monkeypatch.setattr("rlframework.runner.launch.build_parts", parts)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunTerminated, match="terminated") as caught:
        run(run_config("sft", *overrides(tmp_path / "run")))
    assert caught.value.exit_code == 143
    assert released == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_nothing_to_resume(run_config, tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run to resume: it has no config\.yaml"):
        resume(tmp_path)
    run(run_config("sft", *overrides(tmp_path / "run"), "checkpoints.every=0"))
    with pytest.raises(ConfigError, match=r"has no checkpoint to resume from.*checkpoints\.every=N"):
        resume(tmp_path / "run")


def test_a_run_that_was_killed_before_its_first_checkpoint_says_so(run_config, tmp_path):
    run(run_config("sft", *overrides(tmp_path / "run"), "algorithm.num_steps=3", "checkpoints.every=4"))
    for written in ("checkpoints", "model"):  # at the end
        shutil.rmtree(tmp_path / "run" / written)
    with pytest.raises(
        ConfigError, match=r"resume from: it ended at step 3, and checkpoints\.every is 4\. Start"
    ) as error:
        resume(tmp_path / "run")
    assert "checkpoints.every=N" not in str(error.value)


def test_two_processes_do_not_share_a_run(run_config, tmp_path):
    run(run_config("sft", *overrides(tmp_path / "run")))
    with exclusive_directory(tmp_path / "run"), pytest.raises(UserError, match="another process is running in"):
        resume(tmp_path / "run")


def test_other_data_is_rejected(run_config, tmp_path):
    run(run_config("sft", *overrides(tmp_path / "run"), "algorithm.num_steps=4"))
    with pytest.raises(UserError, match="the saved position in the data is for"):
        resume(tmp_path / "run", ["seed=4"])


def test_a_resume_that_is_rejected_changes_no_file(run_config, tmp_path):
    """Full weights are resumed as adapters, from a step before the last, with other settings besides."""
    run(run_config("sft", *overrides(tmp_path / "run"), "algorithm.num_steps=5", "checkpoints.every=4"))
    shutil.rmtree(checkpoints_in(tmp_path / "run")[-1])
    before = contents(tmp_path / "run")
    with pytest.raises(UserError, match=r"no adapters: it is of a run without policy\.lora"):
        resume(tmp_path / "run", ["algorithm.num_steps=6", "policy.lora={rank: 4}", "policy.optimizer.lr=1e-4"])
    assert contents(tmp_path / "run") == before
    resume(tmp_path / "run", ["algorithm.num_steps=6"])
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["resumed"]["changed"] == {
        "algorithm.num_steps": [5, 6]
    }


# -- processes that are ended ------------------------------------------------------------------------------------------


ANNOUNCED = "algorithm.loss.name='probe_moments:Announced'"


@pytest.fixture
def started(run_config, tmp_path):
    """`started(out, hold_at)`: a process that runs into `out`, and waits at an event, whose folder comes with it."""
    processes = []

    def start(out: Path, hold_at: str):
        config = run_config("sft", *overrides(out, "algorithm.num_steps=12", ANNOUNCED))
        process, moments = begin(config, tmp_path / f"{out.name}.yaml", hold_at)
        processes.append(process)
        return process, moments

    yield start
    for process in processes:
        process.kill()
        process.join()


def test_an_interrupted_run_saves_first(run_config, tmp_path, started):
    run(run_config("sft", *overrides(tmp_path / "whole", "algorithm.num_steps=12", ANNOUNCED)))
    process, moments = started(tmp_path / "told", "loss 0 9")
    wait_for(moments / "reached", process)
    os.kill(process.pid, signal.SIGINT)
    (moments / "go").touch()
    process.join(200)
    assert not process.is_alive()
    assert checkpoints_in(tmp_path / "told")
    resume(tmp_path / "told", [ANNOUNCED])
    assert_same_run(tmp_path / "whole", tmp_path / "told")

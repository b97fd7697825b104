"""Asynchronous runs: equal to synchronous ones without staleness, bounded with it, exact after faults and resumes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from probe_runs import assert_same_weights, begin, numbers_of, rows_of, wait_for
from probe_tasks import Digits

from rlframework import run
from rlframework.algorithms.checkpoints import checkpoints_in
from rlframework.base.errors import ConfigError, DataError, EngineFault, UserError
from rlframework.generation.engine_starter import EngineStarter
from rlframework.interfaces.generation import WeightSpan
from rlframework.plugins.configure import config_yaml
from rlframework.rollout.asynchronous import AsynchronousRollouts
from rlframework.rollout.tickets import Ticket
from rlframework.runner.launch import dry_run, resume

pytestmark = pytest.mark.slow

APART = (
    "generation.workers.group=processes",
    "algorithm.validation={at_start: false, at_end: false, every: 0}",
    "observers.samples=32",
)
LONG = ("generation.max_new_tokens=40", "generation.batch_size=8", "generation.max_in_flight=8")
"""The engine decodes 8 rows at a time, so it is never done when a step is."""
STOPS = ("generation.max_new_tokens=6", "generation.stop_token_ids=[8, 9, 10, 11, 12, 13]")
GAME = (*STOPS, 'plugins=["probe_games"]', "~environment", "environment={name: two_turns, max_episode_tokens: 24}")


CURRICULUM = (
    "algorithm.curriculum={skip_epochs: 1}",
    "algorithm.prompts_per_step=16",
    "algorithm.samples_per_prompt=2",
)


def staleness(most: int, **more: object) -> str:
    return f"algorithm.async={ {'max_staleness': most, **more} }".replace("'", "")


def prompts_of(folder: Path) -> dict[int, Counter[str]]:
    """The prompts that the run in `folder` trained on, by step."""
    found: dict[int, Counter[str]] = {}
    for row in rows_of(folder / "samples.jsonl"):
        if row["kind"] == "train":
            found.setdefault(row["step"], Counter())[row["prompt"]] += 1
    return found


def numbers(folder: Path) -> dict[int, dict[str, float]]:
    return {
        step: {name: value for name, value in row.items() if name != "validation/refit_seconds"}
        for step, row in numbers_of(folder).items()
    }


def metric(folder: Path, name: str) -> list[float]:
    return [row[name] for row in rows_of(folder) if name in row]


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(("algorithm.dynamic_sampling=3",), marks=pytest.mark.thorough),
        (*GAME, "environment.gather_timeout=20"),
        CURRICULUM,
    ],
)
def test_without_staleness_a_run_is_the_synchronous_one_bit_for_bit(
    run_config: Any, tmp_path: Path, reward_model: Path, environment: tuple[str, ...]
) -> None:
    """Episodes have the scores of a reward model in their rewards, too."""
    scored = (f"reward_model.model_name={reward_model}",) if "~environment" in environment else ()
    options = ("generation.workers.group=processes", *environment, *scored)
    run(run_config("grpo", f"output_dir={tmp_path}/sync", *options))
    run(run_config("grpo", f"output_dir={tmp_path}/async", *options, staleness(0)))
    assert_same_weights(tmp_path / "sync", tmp_path / "async")
    assert numbers(tmp_path / "sync") == numbers(tmp_path / "async")
    assert metric(tmp_path / "async", "async/staleness_max") == [0.0, 0.0, 0.0]
    assert len(metric(tmp_path / "async", "train/model_score")) == 3 * len(scored)
    skipped = sum(metric(tmp_path / "async", "train/prompts_skipped"))  # 48 of 30 prompts
    assert (skipped > 0) == (environment == CURRICULUM)


@pytest.mark.parametrize("update", ["in_flight", "drain"])
def test_staleness_is_bounded_and_prompts_are_those_of_the_synchronous_run(
    run_config: Any, tmp_path: Path, update: str
) -> None:
    options = (*APART, "algorithm.num_steps=6", *LONG)
    run(run_config("grpo", f"output_dir={tmp_path}/sync", *options))
    run(run_config("grpo", f"output_dir={tmp_path}/async", *options, staleness(2, weight_updates=update)))
    assert prompts_of(tmp_path / "async") == prompts_of(tmp_path / "sync")
    stale = metric(tmp_path / "async", "async/staleness_max")
    assert len(stale) == 6
    assert 0 < max(stale) <= 2
    assert metric(tmp_path / "async", "train/importance_weight")  # the correction is on
    mixed = metric(tmp_path / "async", "async/mixed_version_groups")
    assert (sum(mixed) > 0) == (update == "in_flight")
    timeline = [json.loads(line) for line in (tmp_path / "async" / "timeline.jsonl").read_text().splitlines()]
    assert [row["step"] for row in timeline] == [1, 2, 3, 4, 5, 6]
    lanes = {name for row in timeline for name in row["lanes"]}
    assert lanes - {"environment"} == {"engine 0", "refits", "trainer"}  # its scores may be too short for a lane
    assert all("train" in {activity for activity, *_ in row["lanes"]["trainer"]} for row in timeline)
    busy, whole = (sum(row["busy"].get("engine 0", 0.0) for row in timeline), sum(row["seconds"] for row in timeline))
    assert 0 < busy <= whole


def test_without_staleness_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(run_config: Any, tmp_path: Path) -> None:
    options = (*APART, "checkpoints.every=2")
    run(run_config("grpo", f"output_dir={tmp_path}/whole", *options, "algorithm.num_steps=4"))
    run(run_config("grpo", f"output_dir={tmp_path}/two", *options, "algorithm.num_steps=2"))  # synchronous so far
    resume(tmp_path / "two", ["algorithm.num_steps=4", staleness(0)])
    assert_same_weights(tmp_path / "whole", tmp_path / "two")
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "two")
    with pytest.raises(DataError, match=r"resume it with algorithm\.async"):
        resume(tmp_path / "two", ["algorithm.num_steps=5", "algorithm.async=null"])


@pytest.mark.thorough
@pytest.mark.parametrize("most", [None, 0, 2])
def test_the_number_of_engines_may_change_on_resume(run_config: Any, tmp_path: Path, most: int | None) -> None:
    """From 2 to 1 and to 3, against 2 all the time: what engines return agrees up to rounding, which no loss reads."""
    options = (*APART, "generation.workers.num_workers=2", "checkpoints.every=1")
    run(run_config("grpo", f"output_dir={tmp_path}/whole", *options, "algorithm.num_steps=4"))
    more = () if most is None else (staleness(most),)
    run(run_config("grpo", f"output_dir={tmp_path}/run", *options, *more, "algorithm.num_steps=2"))
    resume(tmp_path / "run", ["algorithm.num_steps=3", "generation.workers.num_workers=1"])
    resume(tmp_path / "run", ["algorithm.num_steps=4", "generation.workers.num_workers=3"])
    assert prompts_of(tmp_path / "run") == prompts_of(tmp_path / "whole")
    if most:
        assert max(metric(tmp_path / "run", "async/staleness_max")) <= most
    else:
        timeline = rows_of(tmp_path / "run" / "timeline.jsonl")
        assert [sum(name.startswith("engine") for name in row["lanes"]) for row in timeline] == [2, 2, 1, 3]
        assert_same_weights(tmp_path / "whole", tmp_path / "run")


@pytest.mark.thorough
@pytest.mark.timeout(700)
@pytest.mark.xdist_group("ray")
def test_engines_are_added_on_a_node_that_joined_the_cluster_after_the_run_began(
    run_config: Any, tmp_path: Path
) -> None:
    """A resume with two engines and room for one says what it waits for; when a second node has joined, both work."""
    run(run_config("grpo", f"output_dir={tmp_path}/whole", *APART, "algorithm.num_steps=6"))
    ray = ("generation.workers.group=ray", "checkpoints.every=2", staleness(1), f"output_dir={tmp_path}/run")
    (tmp_path / "run.yaml").write_text(config_yaml(run_config("grpo", *APART, *ray, "algorithm.num_steps=2")))
    program = Path(__file__).parents[1] / "fixtures" / "probe_growing_cluster.py"
    ran = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "run.yaml")],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(program.parent), *sys.path]))},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    (said,) = told["said"]
    assert re.match(r"Waiting up to \d+ s for resources or further nodes\. ", said)
    assert "'GenerationWorker 2 of 2' requests bundles of CPU 1 (node 0: 1), in total CPU 1" in said
    assert "CPU 1 (0 free)" in said
    first, second = told["nodes"]
    assert told["before"] == {"0": first}
    assert sorted(told["after"].values()) == sorted([first, second])
    busy = [row["busy"] for row in rows_of(tmp_path / "run" / "timeline.jsonl") if row["step"] > 2]
    assert all(sum(row.get(f"engine {number}", 0.0) for row in busy) > 0 for number in (0, 1))
    assert prompts_of(tmp_path / "run") == prompts_of(tmp_path / "whole")
    assert max(metric(tmp_path / "run", "async/staleness_max")) <= 1


def test_a_killed_run_is_resumed_without_losing_or_repeating_a_prompt(run_config: Any, tmp_path: Path) -> None:
    run(run_config("grpo", f"output_dir={tmp_path}/sync", *APART, "algorithm.num_steps=8"))
    options = (*APART, "algorithm.num_steps=8", "checkpoints.every=2", staleness(2), f"output_dir={tmp_path}/run")
    process, moments = begin(run_config("grpo", *options), tmp_path / "run.yaml", r"step-000006")
    wait_for(moments / "reached", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert checkpoints_in(tmp_path / "run")[-1].name == "step-000004"
    resume(tmp_path / "run")
    assert prompts_of(tmp_path / "run") == prompts_of(tmp_path / "sync")
    assert max(metric(tmp_path / "run", "async/staleness_max")) <= 2


def test_the_loss_of_the_only_engine_changes_nothing(
    run_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced while the step waits, and completes the requests that had no answer.

    These are then decoded beside fewer rows, so the log-probabilities of engines, which metrics alone read here, differ
    in rounding. All else is that of an undisturbed run, bit for bit.
    """
    run(run_config("grpo", f"output_dir={tmp_path}/whole", *APART, staleness(0)))
    ordinary = AsynchronousRollouts.rollout

    def after_a_loss(self: AsynchronousRollouts, step: int, number: int) -> Any:
        if step == 2:
            (engine,) = self._parts.generation.client.engines
            (info,) = engine.call("get_info")
            os.kill(info["pid"], signal.SIGKILL)
        return ordinary(self, step, number)

    monkeypatch.setattr(AsynchronousRollouts, "rollout", after_a_loss)
    run(run_config("grpo", f"output_dir={tmp_path}/lost", *APART, staleness(0)))
    assert_same_weights(tmp_path / "whole", tmp_path / "lost")
    whole, lost = numbers(tmp_path / "whole"), numbers(tmp_path / "lost")
    for step, row in whole.items():
        of_engines = {name for name in row if name.startswith("train/generation_")}
        assert of_engines
        assert lost[step] == row | {name: pytest.approx(row[name], abs=1e-6) for name in of_engines}
    assert metric(tmp_path / "lost", "generation/lost_engines") == [1.0]


def test_a_lost_engine_is_replaced_while_the_other_goes_on(
    run_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 3 to 5 are generated and trained while the replacement cannot start; step 6 begins with its refit."""
    may_start, begun, seen = threading.Event(), list[int](), dict[int, list[bool]]()
    start, rollout = EngineStarter._start_one, AsynchronousRollouts.rollout

    def start_later(self: EngineStarter, index: int) -> Any:
        begun.append(index)
        assert len(begun) <= 2 or may_start.wait(300)
        return start(self, index)

    def with_a_loss(self: AsynchronousRollouts, step: int, number: int) -> Any:
        generation: Any = self._parts.generation
        result = rollout(self, step, number)
        seen[step] = [engine.lost for engine in generation.client.engines]
        if step == 2:
            (info,) = generation.client.engines[1].call("get_info")
            os.kill(info["pid"], signal.SIGKILL)
        elif step == 5:
            may_start.set()
            generation._starting[1].result()
        return result

    monkeypatch.setattr(EngineStarter, "_start_one", start_later)
    monkeypatch.setattr(AsynchronousRollouts, "rollout", with_a_loss)
    options = (*APART, "generation.workers.num_workers=2", "algorithm.num_steps=7", staleness(1))
    run(run_config("grpo", f"output_dir={tmp_path}/run", *options))
    assert seen == {step: [False, 3 <= step <= 5] for step in range(1, 8)}
    assert sorted(begun) == [0, 1, 1]
    assert metric(tmp_path / "run", "generation/lost_engines") == [1.0]
    assert metric(tmp_path / "run", "async/failed_groups") == [0.0] * 7


def test_an_environment_that_fails_costs_its_group_alone(
    run_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is trained in a later step; the others stay where they are."""
    run(run_config("grpo", f"output_dir={tmp_path}/sync", *APART))
    first = next(iter(prompts_of(tmp_path / "sync")[1]))
    ordinary, failed = Digits.step, list[str]()

    def fails_once(self: Digits, samples: Any, conversations: Any) -> Any:
        prompts = {sample.messages[-1]["content"] for sample in samples}
        if first in prompts and not failed:
            if len(prompts) == 1:  # a call with other groups fails too, and then each group is scored alone
                failed.append(first)
            raise RuntimeError("the reward process died")
        return ordinary(self, samples, conversations)

    monkeypatch.setattr(Digits, "step", fails_once)
    result = run(run_config("grpo", f"output_dir={tmp_path}/run", *APART, staleness(1)))
    assert metric(tmp_path / "run", "async/failed_groups") == [1.0, 0.0, 0.0]
    assert result.history[0]["train/global_valid_toks"] < result.history[1]["train/global_valid_toks"]
    assert prompts_of(tmp_path / "run")[3][first] == 8  # due at step 1 + max_staleness + 1
    others = prompts_of(tmp_path / "sync")
    assert prompts_of(tmp_path / "run")[2] == others[2]


def test_a_group_that_misses_its_deadline_has_failed(
    run_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(Digits, "step", lambda *_: ended.wait(300))
    try:
        with pytest.raises(UserError, match="all 4 groups of step 1 failed; the first: it was not complete 1 seconds"):
            run(run_config("grpo", f"output_dir={tmp_path}/run", *APART, staleness(0, deadline=1.0)))
    finally:
        ended.set()


def test_a_token_of_a_version_that_was_never_sent_ends_the_run() -> None:
    """It is a fault of the engine, not of the environment whose group has the token."""
    rollouts: Any = object.__new__(AsynchronousRollouts)
    rollouts._step_of = {4: 3, 5: 4}
    rollouts._player = SimpleNamespace(spans=lambda group: [WeightSpan(0, 1, version) for version in group])
    rollouts._parts = SimpleNamespace(config=SimpleNamespace(generation=SimpleNamespace(name="mine")))
    ticket = Ticket(number=7, step=5, slot=0, prompt=0, attempt=0, version=4)
    assert rollouts._steps_of(ticket, [4, 5, 5]) == {3, 4}
    with pytest.raises(EngineFault, match=r"weights version 3, but .* are 4, 5: the spans of engine 'mine' are wrong"):
        rollouts._steps_of(ticket, [5, 3])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ((), r"generation\.workers is not set.*group: processes"),
        (("generation.workers.group=inline",), r"generation\.workers is with group=inline"),
        (
            (*APART, "generation.cache_after_update=keep"),
            r"cache_after_update=keep has no effect with algorithm\.async",
        ),
    ],
    ids=["no workers", "inline", "a kept cache"],
)
def test_configurations_that_cannot_be_asynchronous(run_config: Any, keys: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        dry_run(run_config("grpo", *keys, staleness(1)))


@pytest.mark.thorough
def test_agents_behind_the_endpoint_are_within_the_bound(run_config: Any, tmp_path: Path) -> None:
    """Step 1 is sampled with the first weights alone, so its conversations are those of the synchronous run."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+4=", "answer": str(n)}) + "\n" for n in range(12)))
    agents = ("~environment", f"environment={{name: agent, agent: 'probe_agents:asks_twice', path: {data}}}")
    options = (*APART, *agents, "generation.batch_size=8", "generation.max_in_flight=8", "generation.max_new_tokens=12")
    run(run_config("grpo", f"output_dir={tmp_path}/sync", *options))
    run(run_config("grpo", f"output_dir={tmp_path}/async", *options, staleness(2)))
    first = [
        sorted((row["prompt"], row["completion"], row["reward"]) for row in samples if row["step"] == 1)
        for samples in (rows_of(tmp_path / "sync" / "samples.jsonl"), rows_of(tmp_path / "async" / "samples.jsonl"))
    ]
    assert first[0] == first[1] != []
    assert prompts_of(tmp_path / "async") == prompts_of(tmp_path / "sync")
    assert metric(tmp_path / "async", "train/episode_turns") == [2.0] * 3
    assert max(metric(tmp_path / "async", "async/staleness_max")) in (1, 2)
    assert metric(tmp_path / "async", "async/failed_groups") == [0.0] * 3


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder whose path is short enough for the sockets below it."""
    with TemporaryDirectory(prefix="rlf-", dir="/tmp") as path:
        yield Path(path)


def test_an_asynchronous_run_leaves_nothing_in_tmpdir(run_config: Any, tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "run.yaml"
    options = ("algorithm.num_steps=2", "algorithm.async={max_staleness: 1}", "generation.workers.group=processes")
    config = run_config("grpo", *options, "algorithm.validation={at_start: false, at_end: false, every: 0}")
    file.write_text(config_yaml(config))
    command = [sys.executable, "-m", "rlframework.cli", "train", str(file)]
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    ended = subprocess.run(command, env=environment, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert os.listdir(folder) == []

"""The example plugins: each conforms to its suite; the observer, which has none, observes a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlframework import load_config, run
from rlframework.base.errors import ConfigError

pytestmark = pytest.mark.slow

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
MODULES = sorted((PLUGINS / "rlframework_examples").glob("*.py"))


@pytest.fixture
def installed(tmp_path):
    """Environment variables with which processes find the examples as if installed by pip."""
    project = tomllib.loads((PLUGINS / "pyproject.toml").read_text())["project"]
    info = tmp_path / "rlframework_examples-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"]["rlframework"]
    lines = [f"{name} = {module}" for name, module in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[rlframework]", *lines, ""]))
    path = os.pathsep.join([str(tmp_path), str(PLUGINS), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)}


def rlframework(variables, folder, *words):
    """Run the command, which must succeed, and return its output."""
    line = [sys.executable, "-m", "rlframework.cli", *words]
    done = subprocess.run(line, env=variables, cwd=folder, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_each_is_at_most_60_lines(path):
    assert len(path.read_text().splitlines()) <= 60


def test_all_are_listed_and_their_records_are_light(installed, tmp_path):
    rows = json.loads(rlframework(installed, tmp_path, "plugins", "--json"))
    found = {row["kind"]: (row["name"], row["status"]) for row in rows if row["distribution"] == "rlframework-examples"}
    assert found == {
        "environment": ("reversal", "active"),
        "data_processor": ("longest_first", "active"),
        "worker_group": ("stopwatch", "active"),
    }
    code = "import sys, rlframework_examples.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=installed, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "verdicts"),
    [
        (["reversal"], ["reversal  EnvironmentSuite  CONFORMANT  "]),
        (["longest_first"], ["longest_first  DataProcessorSuite  CONFORMANT  "]),
        (
            ["stopwatch", "--layout", "data=1", "--layout", "data=2"],
            ["stopwatch  WorkerGroupSuite  data=1  CONFORMANT  ", "stopwatch  WorkerGroupSuite  data=2  CONFORMANT  "],
        ),
    ],
    ids=["reversal", "longest_first", "stopwatch"],
)
def test_each_part_conforms(installed, tmp_path, words, verdicts):
    printed = rlframework(installed, tmp_path, "conformance", *words)
    for verdict in verdicts:
        assert verdict in printed


def test_the_stopwatch_tells_of_a_slow_call(monkeypatch, caplog):
    """Test only what it adds to `processes`, without starting any."""
    monkeypatch.syspath_prepend(PLUGINS)
    from rlframework_examples.stopwatch import ProcessWorkerGroup, StopwatchGroup

    class Two:
        size = 2

    group = StopwatchGroup.__new__(StopwatchGroup)
    group._sharding, group._slow = Two(), 0.0
    monkeypatch.setattr(ProcessWorkerGroup, "get_all_worker_results", lambda self, future, **keys: [future, keys])
    assert group.get_all_worker_results("future", kept=True) == ["future", {"kept": True}]
    assert "the answers of 2 workers took 0.0 s" in caplog.text
    caplog.clear()
    group._slow = 60.0
    group.get_all_worker_results("future")
    assert not caplog.text


def test_the_longest_microbatch_comes_first_unless_the_driver_planned(monkeypatch):
    monkeypatch.syspath_prepend(PLUGINS)
    import torch
    from rlframework_examples.longest_first import LongestFirst

    from rlframework.batch.batched_data_dict import BatchedDataDict
    from rlframework.interfaces.data_processor import BatchPlan, MicrobatchRule

    lengths = torch.tensor([2, 6, 3, 4])
    data = BatchedDataDict({"input_ids": torch.ones(4, 6, dtype=torch.int64), "input_lengths": lengths})
    plan, rule, cpu = BatchPlan("padded", 1, 100), MicrobatchRule(), torch.device("cpu")
    found = LongestFirst().microbatches(data, plan, rule, positions="all", device=cpu)
    assert [one.rows.tolist() for one in found] == [[1], [3], [2], [0]]


def test_a_batching_mode_is_one_file(monkeypatch, tmp_path, tiny_llama):
    """Its key is checked as others are, and a run on two processes learns the same as with padded microbatches."""
    monkeypatch.syspath_prepend(PLUGINS)
    values = {
        "plugins": ["rlframework_examples.by_length"],
        "algorithm": {"name": "sft", "num_steps": 2},
        "environment": {"name": "addition", "digits": 2},
        "policy": {
            "model_name": str(tiny_llama),
            "train_global_batch_size": 8,
            "train_micro_batch_size": 2,
            "data_processor": "by_length",
            "batching": {"longest_first": True},
        },
        "worker_group": {"name": "processes", "num_workers": 2},
        "observers": {"console": False, "tensorboard": False, "curve": False},
    }
    with pytest.raises(ConfigError, match=r"policy\.batching\.shortest_first"):
        load_config(values, ["policy.batching.shortest_first=true"])
    with pytest.raises(ConfigError, match=r"policy\.batching\.longest_first"):
        load_config(values, ["policy.data_processor=microbatches"])
    losses = {}
    for mode in ("by_length", "padded"):
        overrides = [f"output_dir={tmp_path / mode}", f"policy.batching.mode={mode}"]
        run(load_config(values, overrides))
        rows = [json.loads(line) for line in (tmp_path / mode / "metrics.jsonl").read_text().splitlines()]
        losses[mode] = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses["padded"]) == 2
    assert losses["by_length"] == pytest.approx(losses["padded"], abs=1e-5)


def test_sorted_rows_are_grouped_by_length(monkeypatch):
    monkeypatch.syspath_prepend(PLUGINS)
    import torch
    from rlframework_examples.by_length import ByLengthConfig, ByLengthProcessor

    from rlframework.batch.batched_data_dict import BatchedDataDict
    from rlframework.interfaces.data_processor import BatchPlan, MicrobatchRule

    lengths = torch.tensor([2, 6, 3, 4, 5])
    data = BatchedDataDict({"input_ids": torch.ones(5, 6, dtype=torch.int64), "input_lengths": lengths})
    plan, rule, cpu = BatchPlan("by_length", 2, 100), MicrobatchRule(), torch.device("cpu")
    for longest_first, expected in ((True, [[1, 4], [3, 2], [0]]), (False, [[0, 2], [3, 4], [1]])):
        processor = ByLengthProcessor(ByLengthConfig(longest_first=longest_first))
        found = processor.microbatches(data, plan, rule, positions="all", device=cpu)
        assert [one.rows.tolist() for one in found] == expected


def test_the_observer_hears_the_run(monkeypatch, tmp_path, tiny_llama, capsys):
    monkeypatch.syspath_prepend(PLUGINS)
    output = tmp_path / "run"
    run(
        load_config(
            {
                "plugins": ["rlframework_examples.best_reward"],
                "output_dir": str(output),
                "algorithm": {"name": "grpo", "num_steps": 3, "prompts_per_step": 4, "samples_per_prompt": 2},
                "environment": {"name": "addition", "digits": 1},
                "policy": {"model_name": str(tiny_llama), "train_global_batch_size": 8},
                "generation": {"max_new_tokens": 2},
                "observers": {"console": False, "tensorboard": False, "curve": False},
            }
        )
    )
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rewards = {row["step"]: row["train/reward"] for row in rows if "train/reward" in row}
    assert sorted(rewards) == [1, 2, 3]
    best = max(rewards, key=lambda step: (rewards[step], -step))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"step 1: best mean reward so far, {rewards[1]:.3f}"
    assert lines[-1] == f"best mean reward {rewards[best]:.3f} at step {best}"

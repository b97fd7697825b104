"""The page on reading curves names metrics that runs have."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from probe_runs import rows_of

from rlframework import load_config, run

DOCS = Path(__file__).parents[2] / "docs"
NAME = re.compile(r"`((?:train|validation)/\w+)`")
OF_PPO = "train/explained_variance"


@pytest.mark.slow
def test_each_metric_on_the_page_is_one_of_a_run(run_config):
    more = ["algorithm.loss={kl_coef: 0.01, importance_correction: truncated}", "algorithm.epochs_per_batch=2"]
    config = run_config("grpo", *more)
    run(config)
    logged = {name for row in rows_of(config.output_dir) for name in row}
    named = set(NAME.findall((DOCS / "curves.md").read_text(encoding="utf-8")))
    assert named - logged == {OF_PPO}
    assert OF_PPO in (DOCS / "algorithms" / "ppo.md").read_text(encoding="utf-8")


def test_the_runs_that_are_broken_on_purpose_can_be_configured(tiny_llama, tmp_path, monkeypatch):
    root = DOCS.parent
    monkeypatch.syspath_prepend(root / "benchmarks")
    import broken_runs

    monkeypatch.delitem(sys.modules, "broken_runs")
    data = broken_runs.write_sums(tmp_path / "sums.jsonl")
    rates = set()
    for changes in broken_runs.RUNS.values():
        keys = [*changes, "algorithm.num_steps=3", *broken_runs.SMALL, f"policy.model_name={tiny_llama}"]
        keys += [f"environment.path={data}"] * ("~environment" in changes)
        config = load_config(root / "examples" / "quickstart" / "grpo.yaml", [*keys, f"output_dir={tmp_path / 'run'}"])
        rows = config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt
        assert rows == 2 * config.policy.train_global_batch_size
        rates.add((config.environment.name, config.policy.optimizer.lr))
    assert len(rates) == len(broken_runs.RUNS)
    for metric in broken_runs.METRICS:
        assert f"`train/{metric}`" in (DOCS / "curves.md").read_text(encoding="utf-8") or metric == "reward"
    assert broken_runs.longer(["123456", ""]) == [0.5, 0.0]

"""The page on reading curves names metrics that runs have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from probe_runs import rows_of

from rlframework import run

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

"""The recipes fit the hardware that they state, and each takes its steps on a CPU with a tiny model."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from probe_runs import rows_of
from tiny_recipes import STEPS, shrunk

from rlframework import load_config, run

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

import recipes_page  # noqa: E402 - a program beside the page that it makes
from model_shapes import model_shapes  # noqa: E402

PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
SHORT = ("sft_0.6b_1gpu", "grpo_0.6b_1gpu")
RECIPES = [
    pytest.param(path, id=path.stem, marks=[] if path.stem in SHORT else pytest.mark.thorough)
    for path in recipes_page.RECIPES
]


@pytest.fixture(scope="module")
def shapes():
    with model_shapes() as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("path", recipes_page.RECIPES, ids=lambda path: path.stem)
def test_each_fits_the_hardware_that_it_states(path, shapes, monkeypatch):
    monkeypatch.syspath_prepend(path.parent)  # of the functions that it names
    found, gpus = recipes_page.planned(path, shapes), recipes_page.hardware(path)
    assert found.verdict().startswith(f"fits on {gpus}: ")
    assert " | ".join(recipes_page.row(path, found)) in PAGE
    assert found.further.keys() == found.config.further_policies.keys()
    workers = found.config.worker_group
    assert workers.num_workers + recipes_page.engines(found) == found.taken == gpus.count
    assert not found.warnings()
    if gpus.count > 8:  # the GPUs of a machine
        assert workers.name == "ray"
        assert workers.workers_per_node == 8
    if recipes_page.engines(found):  # which take GPUs that no worker has
        assert (workers.name, found.config.generation.workers.group) == ("ray", "ray")


@pytest.mark.slow
def test_one_that_does_not_fit_is_found(shapes, monkeypatch):
    path = next(path for path in recipes_page.RECIPES if path.stem == "sft_8b_8gpus")
    monkeypatch.setattr(recipes_page, "hardware", lambda _: recipes_page.PlannedGpus.parse("8xA100 40GB"))
    assert recipes_page.planned(path, shapes).verdict().startswith("fits on")
    monkeypatch.setattr(recipes_page, "hardware", lambda _: recipes_page.PlannedGpus.parse("8x24GiB"))
    assert recipes_page.planned(path, shapes).verdict().startswith("does not fit on")


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES)
def test_each_takes_its_steps_on_a_cpu(path, shapes, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(path.parent)
    small, whole = load_config(path, shrunk(path, shapes, tmp_path)), recipes_page.local_config(path, shapes)
    assert (small.algorithm.name, small.policy.backend) == (whole.algorithm.name, whole.policy.backend)
    run(small)
    steps = [row for row in rows_of(small.output_dir) if row["step"]]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert math.isfinite(steps[-1]["train/loss"])  # the first step of PPO trains the critic alone
    assert (small.output_dir / "model" / "model.safetensors").exists()

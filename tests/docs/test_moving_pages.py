"""The pages for people who come from another framework: our names and keys on them are there."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from model_shapes import model_shapes
from test_pages import blocks

from rlframework import load_config
from rlframework.algorithms.advantages import group_advantages, normalize
from rlframework.environments.tools import tools_of
from rlframework.interfaces.environment import Sample
from rlframework_tools.estimates.plan import PlannedGpus
from rlframework_tools.estimates.printing import estimate_run

FOLDER = Path(__file__).parents[2] / "docs" / "moving"
PAGES = ("nemo_rl", "openrlhf", "trl", "verl")
SECTIONS = ("algorithm", "checkpoints", "environment", "generation", "observers", "policy", "worker_group")
CODE = re.compile(r"`([^`]+)`")


def rows(page: str) -> list[list[str]]:
    lines = (FOLDER / f"{page}.md").read_text(encoding="utf-8").splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]


@pytest.mark.parametrize("page", PAGES)
def test_each_row_names_a_key_that_is_there_or_says_that_there_is_none(page, keys):
    told = 0
    for row in rows(page):
        ours = [word.partition(":")[0] for word in CODE.findall(row[1])]
        named = [word for word in ours if word.split(".")[0] in SECTIONS and "module" not in word]
        assert all(word in keys for word in named), row
        told += len(named)
    assert told > 20


def test_the_environment_of_trl_is_a_class_of_tools():
    """The example of the page: an episode of it, by hand, and no tool but `guess`."""
    text = (FOLDER / "trl.md").read_text(encoding="utf-8")
    module: dict[str, Any] = {}
    exec(next(block.text for block in blocks(text) if block.title == "word_tools.py"), module)  # noqa: S102 - our page
    [spec] = tools_of(module["WordTools"])
    assert spec["function"]["parameters"]["properties"]["word"]["description"] == "a word of five letters"
    tools = module["WordTools"](Sample("1", (), "crane"))
    assert [tools.guess("cable"), tools.reward(""), tools.guess("crane"), tools.reward("")] == [
        "c---e",
        0.0,
        "crane",
        1.0,
    ]


def found(path: str) -> bool:
    """Whether `path` is a module, or a name in one."""
    module, _, name = path.rpartition(".")
    try:
        import_module(path)
    except ModuleNotFoundError:
        return hasattr(import_module(module), name)
    return True


@pytest.mark.parametrize("page", PAGES)
def test_python_paths_are_there(page):
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    for path in set(re.findall(r"`(rlframework(?:_dtensor)?\.[\w.]+)`", text)):
        assert found(path), path


OWNERS = {
    "Batches": ("batch.batched_data_dict", "batch.sharding", "batch.collectives", "batch.packing"),
    "Microbatches": (
        *("interfaces.data_processor", "nemo_rl.microbatches"),
        *("policy.microbatches.global_batch", "policy.microbatches.model_inputs"),
    ),
    "Policy and workers": ("rlframework_dtensor.worker",),
    "Worker groups": (
        *("rlframework_ray.ray_group", "rlframework_ray.worker_builder", "rlframework_ray.virtual_cluster"),
        *("interfaces.named_sharding", "interfaces.worker_group"),
    ),
}
"""The modules that have the names of a section of the page from NeMo-RL."""
CLASSES = ("BatchedDataDict", "DTensorPolicyWorker", "RayWorkerGroup")
"""Classes in them, whose attributes the sections name."""


@pytest.mark.parametrize("heading", OWNERS)
def test_the_names_of_nemo_rl_that_the_page_keeps_are_there(heading):
    text = (FOLDER / "nemo_rl.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    names = [name if name.startswith("rlframework_") else f"rlframework.{name}" for name in OWNERS[heading]]
    places: list[Any] = [import_module(name) for name in names]
    places += [getattr(place, name) for place in places for name in CLASSES if hasattr(place, name)]
    kept = [line for line in section.splitlines() if line.startswith("| `") and "no counterpart" not in line]
    assert kept
    for name in (name for line in kept for name in CODE.findall(line.strip("| ").split(" | ")[0])):
        first, *rest = name.split(".")
        holders = [each for each in places if hasattr(each, first) or first in getattr(each, "__annotations__", ())]
        assert holders or name == "convert_dcp_to_hf", name
        assert all(hasattr(getattr(holders[0], first), part) for part in rest), name


TRANSLATED = {
    # a model of the same size, hardware; rows of a step and of an optimizer step, lr, KL, clips
    "trl": ("Qwen3-0.6B", "1xH100", (64, 16), 1e-5, 0.0, (3e-4, 4e-4), (1.49970, -0.49990)),
    "verl": ("Qwen3-8B", "8xH100", (5120, 1280), 1e-6, 1e-3, (0.2, 0.2), (1.50000, -0.50000)),
    "openrlhf": ("Qwen3-4B", "4xH100", (1024, 1024), 5e-7, 1e-5, (0.2, 0.2), (1.73205, -0.57735)),
    "nemo_rl": ("Qwen3-1.7B", "1xH100", (512, 512), 5e-6, 0.01, (0.2, 0.2), (1.00000, -0.57735)),
}
"""The numbers that the pages call equal; advantages, of the rewards 1, 0, 0, 0, are of the first and of the others."""


@pytest.mark.slow
@pytest.mark.parametrize("page", TRANSLATED)
def test_the_translated_example_is_planned_and_has_the_numbers_of_the_page(page, tmp_path, monkeypatch):
    model, gpus, rows_of_step, lr, kl, clips, wanted = TRANSLATED[page]
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    files = {block.title: block.text for block in blocks(text) if block.title}
    for name in files:
        (tmp_path / name).write_text(files[name], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "math_rewards", raising=False)
    assert yaml.safe_load(files["run.yaml"])["policy"]["model_name"] in text
    with model_shapes() as shapes:
        config = load_config(tmp_path / "run.yaml", [f"policy.model_name={shapes[model]}", "observers.wandb=false"])
        assert estimate_run(config, planned=PlannedGpus.parse(gpus)).verdict().startswith("fits on")
    algorithm, rows = config.algorithm, config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt
    assert (rows, config.policy.train_global_batch_size) == rows_of_step
    assert f"| {rows}, {rows // rows_of_step[1]}, {rows_of_step[1]} |" in text
    assert (config.policy.optimizer.lr, algorithm.loss.kl_coef) == (lr, kl)
    assert (algorithm.loss.ratio_clip_min, algorithm.loss.ratio_clip_max) == clips
    found = worked_group(algorithm)
    assert found == pytest.approx([wanted[0], *[wanted[1]] * 3], abs=6e-6)
    assert f"| {wanted[0]:.5f}, " + ", ".join([f"{wanted[1]:.5f}"] * 3) + " |" in text


def worked_group(algorithm: Any) -> list[float]:
    """The advantages that `algorithm` gives to the rewards 1, 0, 0, 0."""
    found, _ = group_advantages(
        torch.tensor([1.0, 0.0, 0.0, 0.0]),
        4,
        leave_one_out=algorithm.leave_one_out,
        normalize_std=algorithm.normalize_std,
        eps=algorithm.std_epsilon,
    )
    if algorithm.batch_normalization == "none":
        return found.tolist()
    sample = algorithm.batch_normalization == "sample"
    return normalize(found[:, None], torch.ones(4, 1), sample=sample)[:, 0].tolist()

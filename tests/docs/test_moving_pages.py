"""The pages for people who come from another framework: our names and keys on them are there."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "moving"
PAGES = ("nemo_rl", "trl", "verl")
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


def owner(heading: str) -> list[Any]:
    """Where the names of a section of the page from NeMo-RL are."""
    modules = {
        "Batches": ("batch.batched_data_dict", "batch.sharding", "batch.collectives", "batch.packing"),
        "Microbatches": (
            "interfaces.data_processor",
            "microbatches.nemo_rl",
            "microbatches.global_batch",
            "microbatches.model_inputs",
        ),
        "Policy and workers": (),
        "Worker groups": (
            "workers.ray.worker_group",
            "workers.ray.worker_builder",
            "interfaces.named_sharding",
            "workers.ray.virtual_cluster",
            "interfaces.worker_group",
        ),
    }[heading]
    places: list[Any] = [import_module(f"rlframework.{module}") for module in modules]
    if heading == "Policy and workers":
        module = import_module("rlframework_dtensor.worker")
        places += [module.DTensorPolicyWorker, module]
    if heading == "Batches":
        places.append(places[0].BatchedDataDict)
    if heading == "Worker groups":
        places.append(places[0].RayWorkerGroup)
    return places


def _annotated(place: Any) -> set[str]:
    """The attributes that a class declares for its instances."""
    return set(getattr(place, "__annotations__", ())) if isinstance(place, type) else set()


@pytest.mark.parametrize("heading", ["Batches", "Microbatches", "Policy and workers", "Worker groups"])
def test_the_names_of_nemo_rl_that_the_page_keeps_are_there(heading):
    text = (FOLDER / "nemo_rl.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    places = owner(heading)
    kept = [line for line in section.splitlines() if line.startswith("| `") and "no counterpart" not in line]
    assert kept
    for line in kept:
        for name in CODE.findall(line.strip("| ").split(" | ")[0]):
            if name == "convert_dcp_to_hf":
                continue
            first, *rest = name.split(".")
            holders = [place for place in places if hasattr(place, first) or first in _annotated(place)]
            assert holders, name
            assert all(hasattr(getattr(holders[0], first), part) for part in rest), name

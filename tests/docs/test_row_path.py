"""docs/step.md lists the modules on the way of a training row in the order in which a step enters them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import rlframework
from rlframework.algorithms.sft import SFT

DOCS = Path(__file__).parents[2] / "docs"
PACKAGES = ("rlframework/", "rlframework_dtensor/")
MOST = 63
"""Modules that the step enters; it is lowered when there are fewer."""
OPTIMIZED = 2  # of a code object's flags: set in functions, not in the bodies of classes and modules


def listed() -> list[str]:
    """The modules of the page, in order."""
    text = (DOCS / "step.md").read_text(encoding="utf-8")
    section = text.split("## The way of a training row")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)


def trace_second_step(monkeypatch, entered: list[str]) -> None:
    """Note the modules whose functions the second step of a supervised run calls, in order of their first call."""
    ordinary, steps = SFT.train_step, []

    def profile(frame, event, argument):
        if event != "call" or not frame.f_code.co_flags & OPTIMIZED:
            return
        name = frame.f_code.co_filename
        found = next((name[name.rfind("/" + package) + 1 :] for package in PACKAGES if "/" + package in name), None)
        if found is not None and found not in entered:
            entered.append(found)

    def traced(self, *arguments):
        steps.append(arguments)
        if len(steps) == 2:
            sys.setprofile(profile)
        try:
            return ordinary(self, *arguments)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(SFT, "train_step", traced)


@pytest.mark.slow
def test_a_row_takes_the_way_that_the_page_describes(tiny_llama, tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) + "\n" for n in range(40)))
    config = {
        "output_dir": str(tmp_path / "run"),
        "device": "cpu",
        "algorithm": {"name": "sft", "num_steps": 2},
        "environment": {"name": "dataset", "path": str(rows)},
        "policy": {"model_name": str(tiny_llama), "train_global_batch_size": 8, "batching": {"mode": "packed"}},
        "observers": {"console": False, "tensorboard": False, "curve": False},
    }
    entered: list[str] = []
    trace_second_step(monkeypatch, entered)
    rlframework.run(rlframework.load_config(config))
    way = listed()
    assert way == [module for module in entered if module in way]
    assert len(entered) <= MOST, "a step enters more modules than before: merge what is read together, or say why"

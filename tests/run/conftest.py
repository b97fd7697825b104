"""A run small enough for a test: a tiny Llama, a task of its own or one-digit addition, a handful of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def run_config(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`run_config(algorithm, *overrides)`: the checked configuration of a short run in `tmp_path`."""
    from rlframework import load_config

    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # where probe_tasks lies

    def make(algorithm: str, *overrides: str) -> Any:
        values = {
            "seed": 3,
            "output_dir": str(tmp_path / "run"),
            "device": "cpu",
            "algorithm": {"name": algorithm, "num_steps": 3, "validation": {"every": 2, "samples": 8}},
            "plugins": ["probe_tasks"],
            "environment": {"name": "digits"} if algorithm == "grpo" else {"name": "addition", "digits": 1},
            "policy": {
                "model_name": str(tiny_llama),
                "train_global_batch_size": 16,
                "optimizer": {"lr": 1e-3},
                "batching": {"tokens": 64},
            },
            "generation": {"max_new_tokens": 3},
            "observers": {"console": False, "tensorboard": False},
        }
        grpo = ["algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=8"] if algorithm == "grpo" else []
        return load_config(values, [*grpo, *overrides])

    return make

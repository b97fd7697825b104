"""A run small enough for tests: a tiny Llama, a simple task or one-digit addition, a few steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def make_config(tiny_llama: Path):
    """`make_config(folder, algorithm, *overrides)`: like `run_config`, in `folder`, for fixtures of wider scope."""
    from rlframework import load_config

    def make(folder: Path, algorithm: str, *overrides: str) -> Any:
        values = {
            "seed": 3,
            "output_dir": str(folder / "run"),
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


@pytest.fixture
def run_config(make_config: Any, tmp_path: Path):
    """`run_config(algorithm, *overrides)`: the configuration of a short run in `tmp_path`."""
    return partial(make_config, tmp_path)

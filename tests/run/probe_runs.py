"""What several files of this folder do with runs: compare what they wrote, and run one in a process of its own."""

from __future__ import annotations

import os
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from probe_forked import begin_forked
from safetensors.torch import load_file

from rlframework import run
from rlframework.configure import config_yaml, load_config

SHARDED = ("checkpoints.format=sharded", "checkpoints.asynchronous=true")


def weights(path: Path) -> dict[str, torch.Tensor]:
    """What the run in `path` ended with."""
    return load_file(path / "model" / "model.safetensors")


def assert_same_weights(left: Path, right: Path) -> None:
    """To the bit."""
    wanted = weights(left)
    for name, weight in weights(right).items():
        assert torch.equal(weight, wanted[name]), name


def begin(config: Any, path: Path) -> BaseProcess:
    """A process that leads a group with its workers and runs `config`, which is written to `path` for it."""
    path.write_text(config_yaml(config))
    return begin_forked(_run, str(path))


def _run(config: str) -> None:
    os.setsid()
    torch.set_num_threads(1)
    run(load_config(config))

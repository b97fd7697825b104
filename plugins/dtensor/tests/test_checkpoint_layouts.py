"""Sharded checkpoints across layouts: each layout reads the shards that another one wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlframework.algorithms.losses import NLLLoss
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.plugins.manager import create_manager
from rlframework.policy.client import Policy
from rlframework.policy.trained_weights import open_saved
from rlframework_conformance.layouts import Layout
from rlframework_conformance.policies import run_config

CHAIN = ("data=1", "data=2,tensor=2", "context=2", "tensor=2", "data=2", "data=1")
"""A vocabulary of 41, which two and four workers cut in pieces of unequal size."""


def read(folder: Path) -> dict[str, torch.Tensor]:
    with open_saved(folder) as saved:
        return {name: saved[name].clone() for name in saved}


@pytest.fixture
def policy(model_path, tokenizer):
    """`policy(layout)`: a policy that is split so."""
    manager = create_manager()

    def make(layout: str, **keys: Any) -> Policy:
        config = run_config(
            "dtensor", model_path, Layout.parse(layout), manager=manager, optimizer={"lr": 1e-2}, **keys
        )
        return Policy(config, load_tokenizer(str(model_path)), manager)

    return make


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("model_path", [True], indirect=True, ids=["tied"])
def test_sharded_checkpoints_are_bit_equal_across_layouts(policy, batches, tmp_path):
    previous: Path | None = None
    for number, layout in enumerate(CHAIN):
        folder = tmp_path / f"{number}-{layout}"
        with policy(layout) as made:
            if previous is None:
                for batch in batches(2):
                    made.train(batch, NLLLoss())
            else:
                made.load_checkpoint(str(previous / "model"), str(previous / "optimizer"))
            made.save_checkpoint(str(folder / "model"), str(folder / "optimizer"), form="sharded")
        if previous is not None:
            for kind in ("model", "optimizer"):
                wanted, found = read(tmp_path / f"0-{CHAIN[0]}" / kind), read(folder / kind)
                assert sorted(found) == sorted(wanted)
                assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items()), (layout, kind)
        previous = folder


@pytest.mark.slow
@pytest.mark.parametrize("model_path", [False], indirect=True, ids=["untied"])
def test_replicas_are_written_once(policy, tmp_path):
    """With HSDP each of two workers holds the whole model; the files of both together are as large as one model."""
    with policy("data=2", dtensor={"replicate": 2}) as made:
        made.save_checkpoint(str(tmp_path / "model"), str(tmp_path / "optimizer"), form="sharded")
    wanted = sum(tensor.nbytes for tensor in read(tmp_path / "model").values())
    sizes = [path.stat().st_size for path in sorted((tmp_path / "model").glob("*.distcp"))]
    assert len(sizes) == 2
    assert wanted < sum(sizes) < 1.5 * wanted
    assert min(sizes) > 0.3 * sum(sizes)  # both workers write

"""Defaults of an engine: errors of what a capability lacks, and how reference weights are mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlframework.base.errors import NotSupported
from rlframework.plugins.types import Capability
from rlframework.policy.engine import Engine
from rlframework.policy.scoring import require_copy

CALLS = {
    "load_weights": ("portable_optimizer_state", lambda engine: engine.load_weights({})),
    "gather_moments": ("portable_optimizer_state", lambda engine: engine.gather_moments()),
    "load_moments": ("portable_optimizer_state", lambda engine: engine.load_moments({})),
    "sharded_state": ("sharded_checkpoints", lambda engine: engine.sharded_state()),
    "save_native": ("native_checkpoints", lambda engine: engine.save_native(Path("x"), optimizer=True)),
    "load_native": ("native_checkpoints", lambda engine: engine.load_native(Path("x"), optimizer=True)),
    "move": ("cpu_offload", lambda engine: engine.move(torch.device("cpu"), model=True)),
}


@pytest.mark.parametrize("method", CALLS)
def test_error_names_the_missing_capability_and_method(method):
    thin = type("Thin", (Engine,), {name: lambda self: None for name in Engine.__abstractmethods__})(*[None] * 5)
    capability, call = CALLS[method]
    assert capability in {one.value for one in Capability}
    message = f"Thin .*: its backend does not declare {capability}, or declares it without implementing `{method}`"
    with pytest.raises(NotSupported, match=message):
        call(thin)


def test_mixing_is_in_fp32_and_leaves_integers_to_the_policy() -> None:
    """The mean of 256 and 272 with the weights 0.875 and 0.125 is 258, the next number of bfloat16 after 256."""
    reference = {
        "float": torch.tensor([1.0, -2.0]),
        "half": torch.tensor([256.0], dtype=torch.bfloat16),
        "count": torch.tensor([3]),
    }
    policy = {
        "float": torch.tensor([3.0, 2.0]),
        "half": torch.tensor([272.0], dtype=torch.bfloat16),
        "count": torch.tensor([7]),
    }
    engine: Any = None
    Engine.mix(engine, reference, policy, 0.125)
    assert reference["float"].tolist() == [1.25, -1.5]
    assert reference["half"].tolist() == [258.0]
    assert reference["half"].dtype == torch.bfloat16
    assert reference["count"].tolist() == [7]


def test_a_worker_without_a_copy_says_so() -> None:
    with pytest.raises(NotSupported, match=r"sync_reference needs a reference policy .*init_reference_model=False"):
        require_copy(None, "sync_reference")

"""Errors of primitives that belong to a capability and are not implemented."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlframework.base.errors import NotSupported
from rlframework.plugins.types import Capability
from rlframework.policy.engine import Engine

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

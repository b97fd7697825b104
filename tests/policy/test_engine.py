"""What the primitives that belong to a capability say where they are not written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlframework.errors import NotSupported
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
def test_it_is_told_that_the_capability_or_the_method_is_missing(method):
    thin = type("Thin", (Engine,), {name: lambda self: None for name in Engine.__abstractmethods__})()
    capability, call = CALLS[method]
    assert capability in {one.value for one in Capability}
    said = f"Thin .*: its backend does not declare {capability}, or declares it without writing `{method}`"
    with pytest.raises(NotSupported, match=said):
        call(thin)

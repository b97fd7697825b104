"""The driver's handle: what is refused before a worker starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlframework import load_config
from rlframework.errors import NotSupported
from rlframework.plugins.types import Capability, PolicyWorkerRecord
from rlframework.policy.policy import Policy


@pytest.mark.parametrize(
    ("declared", "missing"),
    [
        ({Capability.EMBEDDED_GENERATION}, Capability.REFERENCE_MODEL),
        ({Capability.REFERENCE_MODEL}, Capability.EMBEDDED_GENERATION),
    ],
)
def test_a_backend_that_lacks_what_the_run_needs_is_refused_before_workers_start(tmp_path, declared, missing):
    config = load_config(
        {
            "policy": {"model_name": "m"},
            "algorithm": {"name": "grpo"},
            "environment": {"name": "addition"},
            "output_dir": str(tmp_path / "run"),
        }
    )
    record = PolicyWorkerRecord("thin", "nowhere:Worker", 1, capabilities=frozenset(declared))
    manager = SimpleNamespace(select=lambda kind, name: SimpleNamespace(record=record))
    with pytest.raises(NotSupported, match=f"'thin' does not declare {missing}"):
        Policy(config, None, manager, init_reference_model=True)

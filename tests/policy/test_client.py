"""The driver's handle: what it rejects before a worker starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlframework import build_parts, load_config
from rlframework.errors import NotSupported
from rlframework.plugins.types import Capability, PolicyWorkerRecord
from rlframework.policy.client import Policy


@pytest.fixture
def config(tmp_path):
    return load_config(
        {
            "policy": {"model_name": "m"},
            "algorithm": {"name": "grpo"},
            "environment": {"name": "addition"},
            "output_dir": str(tmp_path / "run"),
        }
    )


def manager_of_a_backend_with(*declared):
    record = PolicyWorkerRecord("thin", "nowhere:Worker", 1, capabilities=frozenset(declared))
    return SimpleNamespace(select=lambda kind, name: SimpleNamespace(record=record))


def test_a_reference_model_needs_a_backend_that_declares_it(config):
    manager = manager_of_a_backend_with(Capability.EMBEDDED_GENERATION)
    with pytest.raises(NotSupported, match="'thin' does not declare reference_model"):
        Policy(config, None, manager, init_reference_model=True)


def test_a_run_needs_a_backend_that_generates(config):
    manager = manager_of_a_backend_with(Capability.REFERENCE_MODEL)
    with (
        pytest.raises(NotSupported, match="'thin' does not declare embedded_generation"),
        build_parts(config, manager=manager),
    ):
        pass

"""Calls that the record does not declare are rejected."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rlframework.base.errors import NotSupported
from rlframework.plugins.types import Capability
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.generation.engine_harness import GenerationHarness

_CALLS: dict[Capability, dict[str, dict[str, Any]]] = {
    Capability.COLLECTIVE_REFIT: {
        "init_collective": {"ip": "127.0.0.1", "port": 29_500, "world_size": 2},
        "update_weights_from_collective": {},
    },
    Capability.IPC_REFIT: {"update_weights_from_ipc_handles": {"ipc_handles": {}}},
    Capability.EMBEDDED_GENERATION: {"attach": {"model": torch.nn.Linear(1, 1), "version": 1}},
    Capability.IN_FLIGHT_UPDATE: {"pause": {}},
}


class Rejections(Suite):
    """Calls that need a capability which the record does not declare."""

    @holds(8)
    def test_calls_that_are_not_declared_are_rejected(self, harness: GenerationHarness) -> None:
        """Undeclared calls must raise `NotSupported`; ignoring them would leave old weights in use."""
        engine = harness.engine()
        for capability, calls in _CALLS.items():
            if capability not in harness.record.capabilities:
                for name, arguments in calls.items():
                    harness.raises(NotSupported, partial(getattr(engine, name), **arguments), name)

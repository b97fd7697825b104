"""Invalid input is rejected with one clear error before any work."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.generation.harness import PROMPTS, GenerationHarness, rows_of
from rlframework.errors import BatchError, ConfigError, NotSupported
from rlframework.plugins.types import Capability

_OVER_A_GROUP = {
    "init_collective": {"ip": "127.0.0.1", "port": 29_500, "world_size": 2},
    "update_weights_from_collective": {},
}
_OVER_HANDLES: dict[str, Any] = {"update_weights_from_ipc_handles": {"ipc_handles": {}}}
_EITHER: dict[str, Any] = {"prepare_refit_info": {"state_dict_info": {}}}


class Rejections(Suite):
    """Invalid settings, invalid batches, and calls that the record does not declare."""

    @holds(8)
    def test_stops_that_are_no_token_are_refused_at_once(self, harness: GenerationHarness) -> None:
        """Stop strings and ids that are not a token must raise a `ConfigError` when the engine is built."""
        for settings, says in (
            ({"stop_strings": ("12",)}, "12"),
            ({"stop_strings": ("x",)}, "x"),
            ({"stop_token_ids": (99,)}, "99"),
        ):
            harness.raises(ConfigError, partial(harness.bare_engine, **settings), f"{settings}", says)

    @holds(8)
    def test_bad_batches_are_refused(self, harness: GenerationHarness) -> None:
        """Batches without seeds and empty prompts must raise a `BatchError`."""
        engine, data = harness.engine(max_new_tokens=2), rows_of(PROMPTS)
        del data["seeds"]
        harness.raises(BatchError, lambda: engine.generate(data), "a batch without seeds", "seeds")
        empty = rows_of([[5], [6]])
        empty["input_lengths"] = torch.tensor([1, 0])
        harness.raises(BatchError, lambda: engine.generate(empty), "a prompt of no token", "input_lengths")

    @holds(8)
    def test_refit_that_is_not_declared_is_refused(self, harness: GenerationHarness) -> None:
        """Undeclared refit calls must raise `NotSupported`; ignoring them would leave old weights in use."""
        declared = harness.record.capabilities
        calls: dict[str, Any] = {}
        if Capability.COLLECTIVE_REFIT not in declared:
            calls |= _OVER_A_GROUP
        if Capability.IPC_REFIT not in declared:
            calls |= _OVER_HANDLES
        if not declared & {Capability.COLLECTIVE_REFIT, Capability.IPC_REFIT}:
            calls |= _EITHER
        engine = harness.engine()
        for name, arguments in calls.items():
            harness.raises(NotSupported, partial(getattr(engine, name), **arguments), name)

"""Updates of the reference policy during a run, as `algorithm.reference_sync` asks for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rlframework.config.algorithms import ReferenceSyncConfig

if TYPE_CHECKING:
    from rlframework.policy.client import Policy

SYNCS = "reference_syncs"
"""The key of `count` in a checkpoint's state. Above 0 the checkpoint has the weights of the reference."""


class ReferenceSync:
    """Moves the reference toward the policy after every `config.steps` steps; None: never."""

    def __init__(self, config: ReferenceSyncConfig | None) -> None:
        self._config = config
        self.count = 0
        """The updates of the reference so far."""

    def after_step(
        self, step: int, policy: Policy, phase: Callable[[str], AbstractContextManager[None]]
    ) -> dict[str, float]:
        """Update the reference if it is due after `step`, within a `phase`; return the metric that tells if it was."""
        if self._config is None:
            return {}
        due = step % self._config.steps == 0
        if due:
            with phase("reference_sync"):
                policy.sync_reference(self._config.alpha)
            self.count += 1
        return {"train/reference_synced": float(due)}

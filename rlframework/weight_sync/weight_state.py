"""Whether an engine has usable weights, and of which version."""

from __future__ import annotations

from rlframework.base.errors import EngineNotReady, RefitError


class WeightState:
    """The weights of an engine: none yet, those of a version, those of an update in progress, or of one that failed."""

    def __init__(self) -> None:
        self._version: int | None = None  # of the latest update, in progress or not
        self._not_ready = "it has no weights yet: give it weights with attach, or with a weight update"

    def begin(self, version: int) -> None:
        """Begin an update, until `commit` or `fail`. Raises `RefitError` for a version before the latest one."""
        if self._version is not None and version < self._version:
            raise RefitError(
                f"the weights of version {version} are older than those of version {self._version}, which the engine "
                "was given before; send the latest weights"
            )
        self._version = version
        self._not_ready = f"its update to version {version} is not finished: call finish_weight_update first"

    def commit(self, version: int) -> None:
        """Use the weights of `version` from now on."""
        self._version, self._not_ready = version, ""

    def fail(self, reason: str) -> None:
        """End the update; there are no usable weights until the next one."""
        self._not_ready = f"its last update, to version {self._version}, failed ({reason}): refit it again"

    def require(self) -> int:
        """Return the version of the weights in use; raise `EngineNotReady` if there are none."""
        if self._not_ready or self._version is None:
            raise EngineNotReady(f"the generation engine cannot serve requests: {self._not_ready}")
        return self._version

"""How far the log-probabilities of an engine may be from the trainer's for the same weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlframework.plugins.types import PROBE_BOUNDS

_HEADROOM = 10.0
"""Later probes may differ by this many times the noise of the first ones: the means of so few tokens vary, and
logits grow in training."""
_FLOOR = 0.1
"""The share of the limit below which noise does not tighten the bound."""


class ProbeBound:
    """The largest mean difference that is allowed: a limit, which the noise of the first sound probes tightens."""

    def __init__(self, limit: float, *, tightened: bool = True) -> None:
        """`tightened`: whether measured noise counts."""
        self._limit, self._tightened = limit, tightened
        self._noise: float | None = None

    @classmethod
    def of(
        cls, configured: float | None, bounds: Mapping[str, float], *, dtypes: Collection[str], tf32: bool
    ) -> ProbeBound:
        """Return the bound of a run.

        `configured`: `generation.refit.probe_bound`, which is not tightened. `bounds`: those of the engine's record.
        `dtypes`: those of the engine's weights and of the trainer's forward, of which the coarser one counts. `tf32`:
        products in fp32 are rounded.
        """
        if configured is not None:
            return cls(configured, tightened=False)
        limits = {**PROBE_BOUNDS, **bounds}
        rounded = {"tf32"} if tf32 and "float32" in dtypes else set[str]()
        return cls(max(limits[dtype] for dtype in {*dtypes, *rounded}))

    @property
    def value(self) -> float:
        """The bound of the next probes."""
        if self._noise is None or not self._tightened:
            return self._limit
        return min(self._limit, max(_FLOOR * self._limit, _HEADROOM * self._noise))

    def accepted(self, error: float) -> None:
        """Take the error of probes that were within the bound for noise, if they are the first."""
        if self._noise is None:
            self._noise = error

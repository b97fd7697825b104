"""How far the log-probabilities of an engine may be from the trainer's for the same weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlframework.plugins.types import PROBE_BOUNDS

_HEADROOM = 10.0
"""Later probes may differ by this many times the noise of the first ones: the mean of so few tokens varies by a factor
of 3, and logits grow in training."""
_FLOOR = 0.1
"""The share of the limit below which noise does not tighten the bound: that of a random model in fp32 is 3e-7, and can
grow to the 2e-5 of a trained one."""


class ProbeBound:
    """The largest mean difference that is allowed: a limit by dtype, in fp32 tightened by the first probes' noise.

    The noise of 16 bits is near their limit, and grows from that of a random model to 20 times as much.
    """

    def __init__(self, limit: float, *, tightened: bool) -> None:
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
        limits, used = {**PROBE_BOUNDS, **bounds}, set(dtypes)
        if tf32 and "float32" in used:
            used.add("tf32")
        return cls(max(limits[dtype] for dtype in used), tightened=used == {"float32"})

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

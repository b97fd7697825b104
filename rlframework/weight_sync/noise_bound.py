"""How far the log-probabilities of an engine may be from the trainer's for the same weights and tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlframework.plugins.types import PROBE_BOUNDS

FLOOR = 0.1
"""The share of the limit below which noise does not tighten the bound: that of a random model in fp32 is 3e-7, and can
grow to the 2e-5 of a trained one."""


class NoiseBound:
    """The largest mean difference that is allowed: the limit of a dtype, tightened by the noise measured so far.

    Noise grows slowly in training, while a fault comes at once. So the bound is `headroom` times the largest mean that
    was within it, but at least `FLOOR` of the limit and at most the limit.
    """

    def __init__(self, limit: float, headroom: float | None = None, dtype: str = "float32") -> None:
        """`headroom`: None if measured noise does not count. `dtype`: the one that `limit` belongs to, for messages."""
        self._limit, self._headroom, self.dtype = limit, headroom, dtype
        self._noise: float | None = None

    @classmethod
    def of(
        cls,
        configured: float | None,
        bounds: Mapping[str, float],
        *,
        dtypes: Collection[str],
        tf32: bool,
        headroom: Mapping[str, float],
    ) -> NoiseBound:
        """Return the bound of a run.

        `configured`: a bound of the configuration, which is not tightened. `bounds`: those of the engine's record.
        `dtypes`: those of the engine's weights and of the trainer's forward, of which the coarser one counts. `tf32`:
        products in fp32 are rounded. `headroom`: by dtype; one that is absent is not tightened.
        """
        limits, used = {**PROBE_BOUNDS, **bounds}, set(dtypes)
        if tf32 and "float32" in used:
            used.add("tf32")
        dtype = max(used, key=lambda each: limits[each])
        if configured is not None:
            return cls(configured, dtype=dtype)
        return cls(limits[dtype], headroom.get(dtype), dtype)

    @property
    def value(self) -> float:
        """The bound of what is measured next."""
        if self._noise is None or self._headroom is None:
            return self._limit
        return min(self._limit, max(FLOOR * self._limit, self._headroom * self._noise))

    def accepted(self, error: float) -> None:
        """Take a mean difference that was within the bound for noise."""
        self._noise = max(self._noise or 0.0, error)

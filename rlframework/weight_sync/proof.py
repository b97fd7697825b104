"""The proof that engines hold the weights that the trainer sent: versions, checksums, and the bound of probes.

A checksum on arrival does not show that a weight is in use, nor in its place: `probes` do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rlframework.base.errors import RefitError
from rlframework.interfaces.generation import WeightReport
from rlframework.plugins.types import PROBE_BOUNDS
from rlframework.weight_sync.buffers import WeightInfo
from rlframework.weight_sync.receiver import listed


def sent_by_all(ranks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Combine what each of the trainer's ranks sent; raise `RefitError` if two sent different bytes of a weight."""
    sent: dict[str, int] = {}
    for rank, sums in enumerate(ranks):
        different = [name for name, value in sums.items() if sent.setdefault(name, value) != value]
        if different:
            raise RefitError(
                f"rank {rank} of the trainer sent other bytes of {listed(different)} than an earlier rank: the ranks' "
                "weights differ"
            )
    return sent


def compare_reports(engine: str, report: WeightReport, version: int, info: WeightInfo, sent: Mapping[str, int]) -> None:
    """Raise `RefitError` unless `engine` holds `version` of the weights `info`, with the checksums `sent`."""
    if missing := [name for name in info if name not in sent]:
        raise RefitError(f"version {version}: the trainer did not send {listed(missing)}")
    require_version(engine, report, version)
    for name, held in report.checksums.items():
        if name not in sent:
            raise RefitError(f"{engine} reports a weight {name!r} of version {version}, which the trainer did not send")
        if held != sent[name]:
            raise RefitError(
                f"{engine} holds {name!r} of version {version} with checksum {held:016x}; the trainer sent "
                f"{sent[name]:016x}"
            )


def require_version(engine: str, report: WeightReport, version: int) -> None:
    """Raise `RefitError` unless `engine` finished its update with `version`."""
    if report.version != version:
        raise RefitError(f"{engine} finished its update with version {report.version}; the trainer sent {version}")


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

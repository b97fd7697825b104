"""The proof that engines hold the weights that the trainer sent: versions and checksums.

A checksum on arrival does not show that a weight is in use, nor in its place: `probes` do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlframework.base.errors import RefitError
from rlframework.interfaces.generation import WeightReport
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

"""Layouts: how a model and its batches are sharded over workers, and the layouts that a suite runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from rlframework.base.errors import ConfigError
from rlframework.plugins.types import CAPABILITY_OF_AXIS, Capability, PolicyWorkerRecord, Record, WorkerGroupRecord

AXES = ("data", "tensor", "context", "pipeline", "expert")


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes. As text: `data=2,tensor=2` or `tensor=2,sequence`; axes of size 1 are omitted.

    A layout with all sizes 1 is `data=1`.
    """

    data: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    sequence: bool = False

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse a layout; raises a `ConfigError` for invalid text."""
        sizes: dict[str, int] = {}
        sequence = False
        for part in filter(None, text.replace(" ", "").split(",")):
            axis, _, size = part.partition("=")
            if part == "sequence":
                sequence = True
            elif axis not in AXES or not size.isdigit() or int(size) < 1 or axis in sizes:
                raise ConfigError(
                    f"{text!r} is not a layout: write axes and sizes such as data=2,tensor=2 "
                    f"(axes: {', '.join(AXES)}; also `sequence`)"
                )
            else:
                sizes[axis] = int(size)
        return cls(**sizes, sequence=sequence)

    @property
    def workers(self) -> int:
        """Number of processes. Experts are distributed over those of the data axis."""
        return self.data * self.tensor * self.context * self.pipeline

    @property
    def parallelism(self) -> dict[str, int | bool]:
        """The section `policy.parallelism`."""
        return {name: value for name, value in asdict(self).items() if name != "data"}

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities that a backend must declare for this layout."""
        axes = [axis for axis in AXES if getattr(self, axis) > 1] + ["sequence"] * self.sequence
        return frozenset(CAPABILITY_OF_AXIS[axis] for axis in axes)

    def __str__(self) -> str:
        sizes = {axis: getattr(self, axis) for axis in AXES}
        named = [f"{axis}={size}" for axis, size in sizes.items() if size > 1] + ["sequence"] * self.sequence
        return ",".join(named) or "data=1"


def enough_gpus(layout: Layout, device: str) -> bool:
    """Return True if there is a GPU for each worker of `layout`, or `device` is a CPU."""
    if device != "cuda":
        return True
    import torch

    return layout.workers <= torch.cuda.device_count()


_SPLITS = ("tensor", "context", "pipeline")


def declared_layouts(record: Record) -> list[Layout]:
    """Return one worker, two along each declared axis, each model axis with two replicas, and each two model axes."""
    declared = record.capabilities
    several = Capability.DATA_PARALLEL in declared
    splits = [axis for axis in _SPLITS if CAPABILITY_OF_AXIS[axis] in declared]
    sizes: list[dict[str, Any]] = [{}]
    sizes += [{"data": 2}] * several
    sizes += [{axis: 2} for axis in splits]
    sizes += [{"tensor": 2, "sequence": True}] * ("tensor" in splits and Capability.SEQUENCE_PARALLEL in declared)
    sizes += [{"data": 2, "expert": 2}] * (several and Capability.EXPERT_PARALLEL in declared)
    sizes += [{"data": 2, axis: 2} for axis in splits if several]
    sizes += [{first: 2, second: 2} for first, second in combinations(splits, 2)]
    return [Layout(**of_axes) for of_axes in sizes]


def quick_layouts(record: Record) -> list[Layout]:
    """Return one worker and the first declared layout of two."""
    layouts = declared_layouts(record)
    return layouts[:1] + [layout for layout in layouts if layout.workers == 2][:1]


_DATA_SIZES: Mapping[str, tuple[tuple[int, ...], str]] = {
    PolicyWorkerRecord.kind: ((1, 2, 4, 8), "the suite's batches have 8 rows, which replicas share equally"),
    WorkerGroupRecord.kind: ((1, 2), "the suite knows the expected results of one or two workers"),
}
"""Kind of record to the sizes of the data axis that its suite supports, and the reason."""


def select_layouts(record: Record, words: Sequence[str] | None) -> list[Layout]:
    """Return the layouts for `words`: `quick` (also for None), `all`, or layouts as text.

    Raises a `ConfigError` for a layout that `record` does not declare or that the suite does not support.
    """
    lists = {"quick": quick_layouts, "all": declared_layouts}
    found = [lists[word](record) if word in lists else [_parse_declared(record, word)] for word in words or ["quick"]]
    return list(dict.fromkeys(layout for layouts in found for layout in layouts))


def _parse_declared(record: Record, word: str) -> Layout:
    if not word.strip():
        raise ConfigError(f"the layout {word!r} is empty; write its dimensions, such as data=2")
    layout = Layout.parse(word)
    if missing := sorted(layout.capabilities - record.capabilities):
        known = ", ".join(f"'{layout}'" for layout in declared_layouts(record))
        raise ConfigError(
            f"layout {word!r}: {record.name!r} does not declare {', '.join(missing)}; its layouts are {known}"
        )
    sizes, why = _DATA_SIZES.get(record.kind, ((layout.data,), ""))
    if layout.data not in sizes:
        *first, last = map(str, sizes)
        raise ConfigError(f"layout {word!r}: data can be {', '.join(first)} or {last}: {why}")
    return layout

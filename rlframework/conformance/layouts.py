"""Layouts: how a model and its batches are split over workers, as the suite runs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import combinations

from rlframework.errors import ConfigError
from rlframework.plugins.types import CAPABILITY_OF_AXIS, Capability, Record

AXES = ("data", "tensor", "context", "pipeline", "expert")


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes. As text: `data=2,tensor=2`, `tensor=2,sequence`; axes of size 1 are left out but `data=1`."""

    data: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    sequence: bool = False

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that `text` describes; a `ConfigError` for anything else."""
        sizes: dict[str, int] = {}
        sequence = False
        for part in filter(None, text.replace(" ", "").split(",")):
            axis, _, size = part.partition("=")
            if part == "sequence":
                sequence = True
            elif axis not in AXES or not size.isdigit() or int(size) < 1 or axis in sizes:
                raise ConfigError(
                    f"{text!r} is no layout: write axes with their sizes, such as data=2,tensor=2 "
                    f"(axes: {', '.join(AXES)}; and `sequence`)"
                )
            else:
                sizes[axis] = int(size)
        return cls(**sizes, sequence=sequence)

    @property
    def workers(self) -> int:
        """Processes that it takes. Experts are spread over those of the data axis."""
        return self.data * self.tensor * self.context * self.pipeline

    @property
    def parallelism(self) -> dict[str, int | bool]:
        """The section `policy.parallelism`."""
        return {name: value for name, value in asdict(self).items() if name != "data"}

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What a backend must declare to be split so."""
        axes = [axis for axis in AXES if getattr(self, axis) > 1] + ["sequence"] * self.sequence
        return frozenset(CAPABILITY_OF_AXIS[axis] for axis in axes)

    def __str__(self) -> str:
        sizes = {axis: getattr(self, axis) for axis in AXES}
        named = [f"{axis}={size}" for axis, size in sizes.items() if size > 1] + ["sequence"] * self.sequence
        return ",".join(named) or "data=1"


_SPLITS = ("tensor", "context", "pipeline")


def declared_layouts(record: Record) -> list[Layout]:
    """One worker, two along each declared axis, each model axis beside two replicas, and each two model axes."""
    return list(_declared(record.capabilities))


def _declared(declared: frozenset[Capability]) -> Iterator[Layout]:
    yield Layout()
    several = Capability.DATA_PARALLEL in declared
    if several:
        yield Layout(data=2)
    splits = [axis for axis in _SPLITS if CAPABILITY_OF_AXIS[axis] in declared]
    for axis in splits:
        yield Layout(**{axis: 2})  # type: ignore[arg-type]
    if "tensor" in splits and Capability.SEQUENCE_PARALLEL in declared:
        yield Layout(tensor=2, sequence=True)
    if several and Capability.EXPERT_PARALLEL in declared:
        yield Layout(data=2, expert=2)
    for axis in splits if several else ():
        yield Layout(data=2, **{axis: 2})  # type: ignore[arg-type]
    for first, second in combinations(splits, 2):
        yield Layout(**{first: 2, second: 2})  # type: ignore[arg-type]


def quick_layouts(record: Record) -> list[Layout]:
    """One worker, and the first declared layout of two."""
    layouts = declared_layouts(record)
    return layouts[:1] + [layout for layout in layouts if layout.workers == 2][:1]

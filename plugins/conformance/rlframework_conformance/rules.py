"""Suites: tests marked with their contract and requirements, sealed against unnoticed changes.

A suite's tests take one argument, `harness`, so that the proof can run them against mutants too. A subclass sets a
backend; it may add tests, but neither override nor delete one: `changed_since_sealed` notices it, and no test runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import getattr_static
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rlframework.plugins.types import Capability, Record
from rlframework_conformance.contracts import CONTRACTS
from rlframework_conformance.harness import Harness
from rlframework_conformance.layouts import Layout

if TYPE_CHECKING:
    from pathlib import Path

    from rlframework.plugins.manager import PluginManager

Test = TypeVar("Test", bound=Callable[..., Any])
SETTINGS = frozenset(
    {"backend", "section", "quick", "every", "pytestmark", "__module__", "__doc__", "__qualname__", "__annotations__"}
)
"""Attributes that a subclass of a sealed suite may set. `section`: keys of the plugin's own section."""


@dataclass(frozen=True)
class Requirement:
    """The requirements of a test: its contract, capabilities, a number of data-parallel ranks, a GPU.

    `without`: capabilities whose declaration leaves nothing to test.
    `alone`: the test runs with one worker only, because other layouts would show nothing more.
    """

    contract: int
    capabilities: frozenset[Capability] = frozenset()
    data_parallel: int = 1
    gpu: bool = False
    alone: bool = False
    without: frozenset[Capability] = frozenset()

    def declared(self, record: Record) -> bool:
        """Return True if `record` declares the required capabilities, and none of those that leave nothing to test."""
        return self.capabilities <= record.capabilities and not self.without & record.capabilities

    def fits(self, layout: Layout, device: str) -> bool:
        """Return True if the test has something to check with `layout` on `device`.

        In layouts with expert parallelism only tests of mixtures run; otherwise these run with one worker only. Tensor-
        parallel plans depend on the architecture, so learned positions, whose model is GPT-2, are not tested with them.
        Rows with images are tested with data parallelism only.
        """
        if self.alone and layout.workers > 1:
            return False
        if layout.tensor > 1 and Capability.LEARNED_POSITIONS in self.capabilities:
            return False
        if layout.workers > layout.data and Capability.MULTIMODAL in self.capabilities:
            return False
        if layout.expert > 1 or (Capability.EXPERT_PARALLEL in self.capabilities and layout.workers > 1):
            return layout.expert > 1 and Capability.EXPERT_PARALLEL in self.capabilities
        return layout.data >= self.data_parallel and (device == "cuda" or not self.gpu)


def holds(
    contract: int,
    *needs: Capability,
    data_parallel: int = 1,
    gpu: bool = False,
    alone: bool = False,
    without: frozenset[Capability] = frozenset(),
) -> Callable[[Test], Test]:
    """Mark a suite test with its `contract` and its requirements."""
    if contract not in CONTRACTS:
        raise ValueError(f"unknown contract {contract}")

    def mark(test: Test) -> Test:
        found = Requirement(contract, frozenset(needs), data_parallel, gpu, alone, without)
        test.requirement = found  # type: ignore[attr-defined]
        return test

    return mark


_SEALED_CONTENTS: dict[type, Mapping[str, tuple[object, ...]]] = {}
"""The contents of each sealed suite; see `changed_since_sealed`."""


class Suite:
    """Base of the suites. Each is created with `sealed=True`; its base classes are not."""

    kind: ClassVar[str] = ""
    """The kind of record that the suite tests."""
    backend: ClassVar[str] = ""
    """The record's name, as used in the configuration."""
    section: ClassVar[Mapping[str, Any]] = {}
    """Keys of the plugin's own section that it needs to run at all, such as the path of a data set."""
    quick: ClassVar[Sequence[str]] = ()
    """Layouts of `--conformance-layout quick` for this class, such as `("data=2",)`; default: one worker, and one
    layout of two.
    """
    every: ClassVar[Sequence[str]] = ()
    """Layouts of `--conformance-layout all` for this class, if `section` supports only some; default: all declared
    ones.
    """
    harness_class: ClassVar[type[Harness]] = Harness
    """The class of the tests' argument."""
    layouts: ClassVar[bool] = False
    """Whether the suite runs once per layout."""
    _sealed: ClassVar[bool] = False

    def __init_subclass__(cls, sealed: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if sealed:
            _seal(cls)

    @classmethod
    def tests(cls) -> dict[str, Requirement]:
        """Return the suite's tests by name, in the order of its base classes, without those that a subclass adds."""
        suite = next((base for base in cls.__mro__ if base.__dict__.get("_sealed")), cls)
        found: dict[str, Requirement] = {}
        for name, value in (item for part in suite.__mro__ for item in part.__dict__.items()):
            if (requirement := getattr(value, "requirement", None)) is not None:
                found.setdefault(name, requirement)
        return found

    @classmethod
    def expected(cls, record: Record, layout: Layout, device: str) -> list[str]:
        """Return the names of the tests that `record` must pass with `layout` on `device`."""
        return [
            name
            for name, requirement in cls.tests().items()
            if requirement.declared(record) and requirement.fits(layout, device)
        ]

    @classmethod
    def undeclared(cls, record: Record) -> list[str]:
        """Return the names of the tests that need undeclared capabilities."""
        return [name for name, requirement in cls.tests().items() if not requirement.declared(record)]

    @classmethod
    def uses(cls, record: Record, layout: Layout, device: str) -> frozenset[Capability]:
        """Return the capabilities of `record` used with `layout` on `device`, by a test or by the layout.

        Expert parallelism counts only if a test of it runs in such a layout.
        """
        tests, used = cls.tests(), layout.capabilities
        needed = [tests[name].capabilities for name in cls.expected(record, layout, device)]
        if layout.expert == 1 or not any(Capability.EXPERT_PARALLEL in one for one in needed):
            needed, used = [one - {Capability.EXPERT_PARALLEL} for one in needed], used - {Capability.EXPERT_PARALLEL}
        return frozenset(one for one in used.union(*needed) if one in record.capabilities)

    @classmethod
    def open_harness(
        cls,
        record: Record,
        layout: Layout,
        *,
        manager: PluginManager,
        device: str,
        folder: Path,
        models: Path,
        target: type | None = None,
        mutant: str | None = None,
    ) -> Harness:
        """Create the argument of a test. `target`, `mutant`: a class instead of the record's, or its mutant's name.

        `folder` belongs to the test, `models` is shared by tests.
        """
        return cls.harness_class(
            record, layout, manager, device, folder, models, target=target, mutant=mutant, section=cls.section
        )


def _seal(cls: type[Suite]) -> None:
    for name in (name for name in dir(cls) if name.startswith("test_")):
        if getattr(getattr(cls, name), "requirement", None) is None:
            raise TypeError(f"{cls.__name__}.{name} has no contract: mark it with @holds")
    cls._sealed = True
    names = [name for name in dir(cls) if name not in SETTINGS and not (name.startswith("__") and name.endswith("__"))]
    _SEALED_CONTENTS[cls] = MappingProxyType({name: _contents(cls, name) for name in names})


def _contents(cls: type, name: str) -> tuple[object, ...]:
    """Return the attribute and, for a function, its code and requirement, none of which may be exchanged."""
    value = getattr_static(cls, name, None)
    function = getattr(value, "__func__", value)
    return value, getattr(function, "__code__", None), getattr(function, "requirement", None)


def changed_since_sealed(suite: type[Suite]) -> list[str]:
    """Return the names in `suite` that differ from when it was sealed: overridden, hidden, replaced or deleted."""
    sealed = next((base for base in suite.__mro__ if base in _SEALED_CONTENTS), None)
    if sealed is None:
        return []
    return [
        name
        for name, before in _SEALED_CONTENTS[sealed].items()
        if any(now is not then for now, then in zip(_contents(suite, name), before, strict=True))
    ]

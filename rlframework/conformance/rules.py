"""What a suite is: tests with the contract that each is of and what it needs; sealed against quiet changes.

A suite's tests take one argument, `bench`, and nothing else, so that the proof can run them against mutants too. A
subclass names a backend; it may add tests, and can neither override nor delete one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import getattr_static
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rlframework.conformance.bench import Bench
from rlframework.conformance.contracts import CONTRACTS
from rlframework.conformance.layouts import Layout
from rlframework.plugins.types import Capability, Record

if TYPE_CHECKING:
    from pathlib import Path

    from rlframework.plugins.manager import PluginManager

Test = TypeVar("Test", bound=Callable[..., Any])
SETTINGS = frozenset(
    {"backend", "section", "quick", "every", "pytestmark", "__module__", "__doc__", "__qualname__", "__annotations__"}
)
"""What a subclass of a sealed suite may set. `section`: keys of the part's own section in the configuration."""


@dataclass(frozen=True)
class Requirement:
    """What a test is of and needs: the number of its contract; capabilities; data-parallel ranks; a GPU."""

    contract: int
    capabilities: frozenset[Capability] = frozenset()
    data_parallel: int = 1
    gpu: bool = False

    def declared(self, record: Record) -> bool:
        """Whether `record` declares what it needs."""
        return self.capabilities <= record.capabilities

    def fits(self, layout: Layout, device: str) -> bool:
        """Whether it has something to test with `layout` on `device`.

        Where experts are spread, the tests of mixtures of experts alone; else these where there is one worker. Plans of
        tensor parallelism are made for an architecture, so learned positions, whose model is GPT-2, are tested without.
        """
        if layout.tensor > 1 and Capability.LEARNED_POSITIONS in self.capabilities:
            return False
        if layout.expert > 1 or (Capability.EXPERT_PARALLEL in self.capabilities and layout.workers > 1):
            return layout.expert > 1 and Capability.EXPERT_PARALLEL in self.capabilities
        return layout.data >= self.data_parallel and (device == "cuda" or not self.gpu)


def holds(contract: int, *needs: Capability, data_parallel: int = 1, gpu: bool = False) -> Callable[[Test], Test]:
    """Mark a test of a suite as one of `contract`, which `needs` capabilities and the rest."""
    if contract not in CONTRACTS:
        raise ValueError(f"there is no contract {contract}")

    def mark(test: Test) -> Test:
        test.requirement = Requirement(contract, frozenset(needs), data_parallel, gpu)  # type: ignore[attr-defined]
        return test

    return mark


_PARTS: set[type] = set()
"""The sealed suites, and all that they were put together from."""
_WHOLE: dict[type, Mapping[str, tuple[object, ...]]] = {}
"""What each sealed suite was made of: see `changed_since_sealed`."""


class _Sealing(type):
    """Refuses what would change the tests of a sealed suite, or of its parts, after it was made."""

    def __setattr__(cls, name: str, value: Any) -> None:
        is_part = cls in _PARTS
        is_there = hasattr(cls, name) or (is_part and name.startswith("test_"))
        if is_there and (is_part or getattr(cls, "_sealed", False)) and name not in SETTINGS and not _is_special(name):
            raise TypeError(f"{cls.__name__}.{name} is part of a conformance suite and cannot be replaced")
        super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        if name.startswith("test_"):
            raise TypeError(f"{cls.__name__}.{name} is a test of a conformance suite and cannot be deleted")
        super().__delattr__(name)


class Suite(metaclass=_Sealing):
    """Base of the suites. Each is made with `sealed=True`; the parts that it is put together from are not."""

    kind: ClassVar[str] = ""
    """The kind of record that the suite is for."""
    backend: ClassVar[str] = ""
    """The name of the record: the word in the configuration."""
    section: ClassVar[Mapping[str, Any]] = {}
    """Keys of the part's own section that it needs to run at all, such as the path of a data set."""
    quick: ClassVar[Sequence[str]] = ()
    """What `--conformance-layout quick` is for this class, such as `("data=2",)`; none: one worker, and one of two."""
    every: ClassVar[Sequence[str]] = ()
    """What `--conformance-layout all` is for this class, where `section` is of some layouts; none: all declared."""
    bench_class: ClassVar[type[Bench]] = Bench
    """What its tests work with."""
    layouts: ClassVar[bool] = False
    """Whether the suite runs once a layout."""
    _sealed: ClassVar[bool] = False

    def __init_subclass__(cls, sealed: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for suite in cls.__mro__[1:]:
            if suite.__dict__.get("_sealed"):
                _refuse_changes(cls, suite)
        if sealed:
            _seal(cls)

    @classmethod
    def tests(cls) -> dict[str, Requirement]:
        """The suite's tests by name, in the order of its parts; those that a subclass adds are not among them."""
        suite = next((base for base in cls.__mro__ if base.__dict__.get("_sealed")), cls)
        return dict(_marked(suite))

    @classmethod
    def expected(cls, record: Record, layout: Layout, device: str) -> list[str]:
        """Names of the tests that `record` must pass with `layout` on `device`."""
        return [
            name
            for name, requirement in cls.tests().items()
            if requirement.declared(record) and requirement.fits(layout, device)
        ]

    @classmethod
    def undeclared(cls, record: Record) -> list[str]:
        """Names of the tests of what `record` does not declare."""
        return [name for name, requirement in cls.tests().items() if not requirement.declared(record)]

    @classmethod
    def uses(cls, record: Record, layout: Layout, device: str) -> frozenset[Capability]:
        """The capabilities of `record` that are put to use with `layout` on `device`: by a test, or by the layout.

        Experts are spread where a test of them runs with such a layout.
        """
        tests, used = cls.tests(), layout.capabilities
        needed = [tests[name].capabilities for name in cls.expected(record, layout, device)]
        if layout.expert == 1 or not any(Capability.EXPERT_PARALLEL in one for one in needed):
            needed, used = [one - {Capability.EXPERT_PARALLEL} for one in needed], used - {Capability.EXPERT_PARALLEL}
        return record.capabilities & used.union(*needed)

    @classmethod
    def open_bench(
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
    ) -> Bench:
        """What a test works with. `target`, `mutant`: a class in place of the record's own, or its broken form.

        `folder` is the test's own, `models` is shared between tests.
        """
        return cls.bench_class(
            record, layout, manager, device, folder, models, target=target, mutant=mutant, section=cls.section
        )


def _marked(suite: type) -> Iterator[tuple[str, Requirement]]:
    seen = set()
    for part in suite.__mro__:
        for name, value in part.__dict__.items():
            if name not in seen and (requirement := getattr(value, "requirement", None)) is not None:
                seen.add(name)
                yield name, requirement


def _seal(cls: type[Suite]) -> None:
    _require_marks(cls)
    type.__setattr__(cls, "_sealed", True)
    _PARTS.update(part for part in cls.__mro__ if issubclass(part, Suite))
    names = [name for name in dir(cls) if name not in SETTINGS and not _is_special(name)]
    _WHOLE[cls] = MappingProxyType({name: _contents(cls, name) for name in names})


def _contents(cls: type, name: str) -> tuple[object, ...]:
    """What `name` is, and for a function what it does and needs: neither may be exchanged within it."""
    value = getattr_static(cls, name, None)
    function = getattr(value, "__func__", value)
    return value, getattr(function, "__code__", None), getattr(function, "requirement", None)


def changed_since_sealed(suite: type[Suite]) -> list[str]:
    """Names in `suite` that are not what they were when it was sealed, however that was done."""
    sealed = next((base for base in suite.__mro__ if base in _WHOLE), None)
    if sealed is None:
        return []
    return [
        name
        for name, before in _WHOLE[sealed].items()
        if any(now is not then for now, then in zip(_contents(suite, name), before, strict=True))
    ]


def _require_marks(cls: type) -> None:
    for name in dir(cls):
        if name.startswith("test_") and getattr(getattr(cls, name), "requirement", None) is None:
            raise TypeError(f"{cls.__name__}.{name} names no contract: mark it with @holds")


def _refuse_changes(cls: type, suite: type) -> None:
    known = set(dir(suite))
    for name in cls.__dict__:
        if name in known and name not in SETTINGS and not _is_special(name):
            raise TypeError(
                f"{cls.__name__} overrides {suite.__name__}.{name}: a conformance suite is run as it is. What the "
                f"backend is known to fail belongs on its record, in known_failures"
            )
    for name in _names_of_tests(suite):
        if getattr(cls, name, None) is not getattr(suite, name):
            raise TypeError(f"{cls.__name__} hides {suite.__name__}.{name} behind another base class")


def _is_special(name: str) -> bool:
    """Whether Python itself sets it."""
    return name.startswith("__") and name.endswith("__")


def _names_of_tests(suite: type) -> list[str]:
    return [name for name in dir(suite) if name.startswith("test_")]

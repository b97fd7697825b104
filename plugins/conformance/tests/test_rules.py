"""The seal of a suite: what a subclass may change, and what is noticed."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlframework.plugins.manager import create_manager
from rlframework.plugins.types import RECORD_TYPES, Capability, PolicyWorkerRecord
from rlframework_conformance import PolicyWorkerSuite
from rlframework_conformance.layouts import Layout, declared_layouts, quick_layouts
from rlframework_conformance.rules import Suite, changed_since_sealed, holds


class Parts(Suite):
    @holds(1)
    def test_plain(self, harness):
        raise AssertionError

    @holds(2, Capability.LORA)
    def test_adapters(self, harness):
        raise AssertionError

    @holds(3, data_parallel=2)
    def test_replicas(self, harness):
        raise AssertionError

    @holds(4, gpu=True)
    def test_gpu(self, harness):
        raise AssertionError

    @holds(2, alone=True)
    def test_kind(self, harness):
        raise AssertionError

    def helper(self):
        return 1


class Sealed(Parts, sealed=True):
    kind = "policy_worker"


class Hiding:
    def test_plain(self, harness):
        pass


def record(*capabilities):
    return PolicyWorkerRecord(name="x", target="x:X", api_version=1, capabilities=frozenset(capabilities))


@pytest.mark.parametrize(
    "body",
    [
        {"test_plain": lambda self, harness: None},
        {"test_plain": None},
        {"helper": None},
        {"kind": "environment"},
        {"layouts": True},
        {"tests": classmethod(lambda cls: {})},
        {"expected": classmethod(lambda cls, *_: [])},
        {"undeclared": classmethod(lambda cls, *_: [])},
        {"open_harness": classmethod(lambda cls, *_, **__: None)},
        {"_sealed": False},
    ],
    ids=lambda body: next(iter(body)),
)
def test_overriding_is_noticed(body):
    assert changed_since_sealed(type("TestIt", (Sealed,), {"backend": "x", **body})) == list(body)


@pytest.mark.parametrize("bases", [(Hiding, Sealed), (type("Deeper", (Hiding,), {}), Sealed)])
def test_hiding_behind_a_mixin_is_noticed(bases):
    assert changed_since_sealed(type("TestIt", bases, {"backend": "x"})) == ["test_plain"]


def test_a_subclass_of_a_subclass_is_no_way_round():
    class TestIt(Sealed):
        backend = "x"

    assert changed_since_sealed(type("TestAgain", (TestIt,), {"test_plain": None})) == ["test_plain"]


def made():
    """A base class, a suite made of it, and a subclass; each test breaks its own."""
    part = type("Part", (Suite,), {"test_plain": holds(1)(lambda self, harness: None), "helper": lambda self: 1})
    sealed = type("OfPart", (part,), {"kind": "policy_worker"}, sealed=True)
    return part, sealed, type("TestIt", (sealed,), {"backend": "x"})


def exchange_code(part, sealed):
    part.test_plain.__code__ = (lambda self, harness: 2).__code__


def exchange_requirement(part, sealed):
    part.test_plain.requirement = holds(1, Capability.LORA)(lambda: None).requirement


@pytest.mark.parametrize(
    "trick",
    [
        lambda part, sealed: setattr(part, "test_plain", holds(1)(lambda self, harness: None)),
        lambda part, sealed: setattr(sealed, "test_plain", holds(1)(lambda self, harness: None)),
        lambda part, sealed: delattr(part, "test_plain"),
        exchange_code,
        exchange_requirement,
    ],
    ids=["set on the part", "set on the suite", "deleted", "code", "requirement"],
)
def test_tricks_behind_the_seal_are_noticed(trick):
    part, sealed, mine = made()
    assert changed_since_sealed(mine) == []
    trick(part, sealed)
    assert changed_since_sealed(mine) == ["test_plain"]


def test_a_subclass_may_add_tests_and_settings():
    class TestIt(Sealed):
        """Mine."""

        backend = "x"
        section = {"a": 1}  # noqa: RUF012
        pytestmark = pytest.mark.slow

        def test_of_mine(self):
            pass

    assert TestIt.tests() == Sealed.tests()


def test_a_test_without_a_contract_is_an_error():
    class Unmarked(Suite):
        def test_nothing(self, harness):
            pass

    with pytest.raises(TypeError, match=r"Mine\.test_nothing has no contract"):

        class Mine(Unmarked, sealed=True):
            pass

    with pytest.raises(ValueError, match="unknown contract 12"):
        holds(12)


def test_what_is_declared_decides_what_is_expected():
    assert list(Sealed.tests()) == ["test_plain", "test_adapters", "test_replicas", "test_gpu", "test_kind"]
    assert Sealed.expected(record(), Layout(), "cpu") == ["test_plain", "test_kind"]
    assert Sealed.expected(record(), Layout(data=2), "cpu") == ["test_plain", "test_replicas"]
    with_lora = Sealed.expected(record(Capability.LORA), Layout(), "cuda")
    assert with_lora == ["test_plain", "test_adapters", "test_gpu", "test_kind"]
    assert Sealed.undeclared(record()) == ["test_adapters"]
    assert Sealed.undeclared(record(Capability.LORA)) == []


def test_what_is_tested_of_what_is_declared():
    everything = record(*Capability)
    splits = {Capability.DATA_PARALLEL, Capability.TENSOR_PARALLEL, Capability.SEQUENCE_PARALLEL}
    assert Sealed.uses(everything, Layout(), "cpu") == {Capability.LORA}
    assert Sealed.uses(record(Capability.SCORING), Layout(), "cpu") == set()
    assert Sealed.uses(everything, Layout(data=2, tensor=2, sequence=True), "cpu") == {Capability.LORA, *splits}
    assert Capability.SEQUENCE_PARALLEL not in Sealed.uses(everything, Layout(tensor=2), "cpu")
    experts = Sealed.uses(everything, Layout(data=2, expert=2), "cpu")
    assert experts == {Capability.DATA_PARALLEL}, "no test of this suite is about experts"
    spread = PolicyWorkerSuite.uses(everything, Layout(data=2, expert=2), "cpu")
    assert spread == {Capability.DATA_PARALLEL, Capability.EXPERT_PARALLEL, Capability.PORTABLE_OPTIMIZER_STATE}
    assert Capability.EXPERT_PARALLEL not in PolicyWorkerSuite.uses(everything, Layout(), "cpu")


def test_all_that_dtensor_declares_is_tested():
    """By all layouts together; a single worker covers everything except parallelism."""
    record = create_manager().select("policy_worker", "dtensor").record
    tested = [PolicyWorkerSuite.uses(record, layout, "cpu") for layout in declared_layouts(record)]
    assert frozenset().union(*tested) == record.capabilities
    splits = {
        Capability.TENSOR_PARALLEL,
        Capability.SEQUENCE_PARALLEL,
        Capability.CONTEXT_PARALLEL,
        Capability.EXPERT_PARALLEL,
    }
    assert record.capabilities - tested[0] == {Capability.DATA_PARALLEL, *splits}
    quick = [PolicyWorkerSuite.uses(record, layout, "cpu") for layout in quick_layouts(record)]
    assert record.capabilities - frozenset().union(*quick) == splits


def test_the_oracle_imports_nothing_of_ours():
    """Import-linter checks this for other packages; this test also for the rest of the conformance package."""
    tree = ast.parse(Path(find_spec("rlframework_conformance.oracle").origin).read_text())
    names = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "torch" in {name.partition(".")[0] for name in (*names, *(node.module or "" for node in froms))}
    assert not [name for name in names if name.startswith("rlframework")]
    assert not [node.module for node in froms if node.level or (node.module or "").startswith("rlframework")]


def test_our_own_parts_have_no_known_failures():
    """Those of the core and of this repository's plugins, of all kinds."""
    manager = create_manager()
    ours = [found for kind in RECORD_TYPES for found in manager.registered(kind).values()]
    ours = [found for found in ours if found.distribution.startswith("rlframework-")]
    assert {"dtensor", "microbatches", "ray", "transformers", "gsm8k"} <= {found.record.name for found in ours}
    assert [found.record.name for found in ours if found.record.known_failures] == []

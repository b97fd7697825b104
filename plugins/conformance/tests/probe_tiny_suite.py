"""A tiny suite and tiny plugins for tests that run pytest on them, and a reader of its output."""

from __future__ import annotations

PARTS = """
    from rlframework.plugins.hookspec import hookimpl
    from rlframework.plugins.types import Capability, EnvironmentRecord, KnownFailure, PolicyWorkerRecord

    def record(name, target, known=(), kind=EnvironmentRecord, capabilities=()):
        return kind(name=name, target=f"tiny_parts:{target}", api_version=1,
                    capabilities=frozenset(capabilities), known_failures=tuple(known))

    KNOWN = KnownFailure("test_the_number_is_two", "ConformanceFailure", "three is nearly two")

    @hookimpl
    def rlframework_environments():
        return [
            record("sound", "Sound"),
            record("boasting", "Sound", capabilities=(Capability.EPISODES, "tiny:scoring")),
            record("wrong", "Wrong"),
            record("raising", "Raising"),
            record("unfinished", "Unfinished"),
            record("skipping", "Skipping"),
            record("absent", "Absent"),
            record("known", "Wrong", [KNOWN]),
            record("other", "Raising", [KNOWN]),
            record("fixed", "Sound", [KNOWN]),
            record("mistaken", "Sound", [KnownFailure("test_of_no_suite", "ValueError", "who knows")]),
        ]

    @hookimpl
    def rlframework_policy_workers():
        both = (Capability.DATA_PARALLEL, Capability.TENSOR_PARALLEL)
        return [record("engine", "Sound", kind=PolicyWorkerRecord, capabilities=both)]

    class Sound:
        number = 2.0

    class Wrong:
        number = 3.0

    class Property:
        def __init__(self, error):
            self.error = error
        def __get__(self, instance, owner):
            raise self.error

    class Raising:
        number = Property(RuntimeError("no number today"))

    class Unfinished:
        number = Property(NotImplementedError("number: return two"))

    import pytest

    class Skipping:
        number = Property(pytest.skip.Exception("not on Sundays"))
"""

SUITE = """
    from rlframework_conformance.harness import Harness
    from rlframework_conformance.rules import Suite, holds
    from rlframework.plugins.types import Capability

    class Parts(Suite):
        @classmethod
        def open_harness(cls, record, layout, *, manager, device, folder, models, target=None, mutant=None):
            return Harness(record, layout, manager, device, folder, models, target=target, mutant=mutant)

        @holds(1)
        def test_it_is_there(self, harness):
            harness.require(harness.load_class(), "the class can be loaded")

        @holds(2)
        def test_the_number_is_two(self, harness):
            harness.scalar("the number", harness.load_class().number, 2.0)

        @holds(3, Capability.EPISODES)
        def test_it_has_adapters(self, harness):
            harness.require(False, "never run")

    class TinySuite(Parts, sealed=True):
        kind = "environment"

    class EngineSuite(Parts, sealed=True):
        kind = "policy_worker"
        layouts = True

        @holds(1, data_parallel=2)
        def test_replicas(self, harness):
            harness.equal("replicas", harness.layout.data, 2)

        @holds(1, gpu=True)
        def test_gpu(self, harness):
            harness.equal("device", harness.device, "cuda")
"""


def run(pytester, *args):
    quick = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:anyio")
    return pytester.runpytest_inprocess(*quick, *args)


def verdict(result):
    """Return the lines of the section of verdicts."""
    lines = result.outlines
    start = next(number for number, line in enumerate(lines) if line.strip("= ") == "conformance")
    return [line for line in lines[start + 1 :] if "Suite" in line and "::" not in line]

"""Layouts that the suites support; all others are rejected before anything starts."""

from __future__ import annotations

import pytest

from rlframework.base.errors import ConfigError
from rlframework.plugins.types import Capability, GenerationEngineRecord, PolicyWorkerRecord, WorkerGroupRecord
from rlframework_conformance.layouts import select_layouts


def record(kind):
    return kind(name="mine", target="x:X", api_version=1, capabilities=frozenset(Capability))


@pytest.mark.parametrize(
    ("kind", "layout", "says"),
    [
        (PolicyWorkerRecord, "data=3", "data can be 1, 2, 4 or 8: the suite's batches have 8 rows"),
        (PolicyWorkerRecord, "data=16,tensor=2", "data can be 1, 2, 4 or 8"),
        (WorkerGroupRecord, "data=4", "data can be 1 or 2: the suite knows the expected results"),
    ],
)
def test_a_layout_that_the_suite_cannot_do_is_refused(kind, layout, says):
    with pytest.raises(ConfigError, match=f"layout '{layout}': {says}"):
        select_layouts(record(kind), [layout])


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        (PolicyWorkerRecord, ["data=1", "data=2", "data=4", "data=8", "data=4,tensor=3", "tensor=3"]),
        (WorkerGroupRecord, ["data=1", "data=2"]),
        (GenerationEngineRecord, ["data=3"]),
    ],
)
def test_others_are_taken(kind, layouts):
    assert [str(layout) for layout in select_layouts(record(kind), layouts)] == layouts
    assert select_layouts(record(kind), ["quick", "all"])

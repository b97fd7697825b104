"""Workers from an import path: finding the class, precedence of options, and single workers on Ray."""

from __future__ import annotations

import copy

import pytest
import ray
from probe_options import OUTER

from rlframework.base.errors import BatchError
from rlframework.workers.failures import FAILURE, portable
from rlframework_ray.virtual_cluster import RayVirtualCluster
from rlframework_ray.worker_actor import Configuration, Description, WorkerClassError, find_class
from rlframework_ray.worker_builder import RayWorkerBuilder, recursive_merge_options, worker_options

pytestmark = pytest.mark.slow

PLACE = {"num_gpus": 0.5, "placement_group": object(), "bundle": 3}
"""Where the worker of the tests without Ray goes; its options are only looked at."""


def described(**options):
    return Description("Worker", {}, options)


# -- the class --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["C", "", "a:", ":C", "a b.C", "a..C"])
def test_an_invalid_import_path_is_rejected_in_the_driver(path):
    with pytest.raises(WorkerClassError, match="write module:Class"):
        RayWorkerBuilder(path)


def test_a_decorated_class_yields_the_plain_class_and_its_options():
    plain, options = find_class("probe_options:Remote")
    assert plain().answer() == 42
    assert options == {"num_cpus": 2, "runtime_env": {"env_vars": {"A": "1"}}}
    assert find_class("probe_options.Plain") == (type(OUTER), {})


@pytest.mark.parametrize(
    ("path", "message"), [("probe_options:Nobody", "has no 'Nobody'"), ("probe_options:OUTER", "name a class")]
)
def test_an_import_path_must_name_a_class(path, message):
    with pytest.raises(WorkerClassError, match=message):
        find_class(path)


# -- options ----------------------------------------------------------------------------------------------------------


def test_options_are_merged_recursively_into_a_copy():
    below, above = {"a": {"x": 1, "y": {"z": 2}}, "b": 3}, {"a": {"y": {"w": 4}}, "b": {"c": 5}}
    before = copy.deepcopy((below, above))
    merged = recursive_merge_options(below, above)
    assert merged == {"a": {"x": 1, "y": {"z": 2, "w": 4}}, "b": {"c": 5}}
    merged["a"]["y"]["z"] = merged["b"]["c"] = 0
    assert (below, above) == before


def test_configure_worker_overrides_the_caller_who_overrides_the_class():
    names = {"class": "1", "caller": "1", "configured": "1"}
    of_class = described(num_cpus=1, max_restarts=2, runtime_env={"env_vars": dict(names), "py_executable": "a"})
    asked = {"num_cpus": 2, "runtime_env": {"env_vars": {"caller": "2", "configured": "2"}, "py_executable": "b"}}
    wants = Configuration({"num_cpus": 3}, {"configured": "3"}, {}, {"working_dir": "/"})
    options = worker_options(of_class, asked, wants, **PLACE)
    place = options.pop("scheduling_strategy")
    assert options == {
        "num_cpus": 3,
        "num_gpus": 0.5,
        "max_restarts": 2,
        "runtime_env": {
            "env_vars": {"class": "1", "caller": "2", "configured": "3"},
            "py_executable": "b",
            "working_dir": "/",
        },
    }
    assert (place.placement_group, place.placement_group_bundle_index) == (PLACE["placement_group"], 3)
    assert place.placement_group_capture_child_tasks


def test_the_placement_cannot_be_overridden_and_nsight_keeps_its_name():
    of_class = described(num_gpus=8, runtime_env={"_nsight": "default"})  # Ray renames `nsight`
    options = worker_options(of_class, {"scheduling_strategy": "SPREAD"}, Configuration(), **PLACE)
    assert options["num_gpus"] == 0.5
    assert options["scheduling_strategy"].placement_group_bundle_index == 3
    assert options["runtime_env"] == {"nsight": "default", "env_vars": {}}
    assert worker_options(described(), {}, Configuration({"num_gpus": 0}), **PLACE)["num_gpus"] == 0


# -- what a worker raises ---------------------------------------------------------------------------------------------


def raised(error):
    """The exception that the driver gets if a worker raises `error`."""
    try:
        raise error
    except Exception as caught:  # noqa: BLE001 - it is what is looked at
        return portable(caught)


def test_a_portable_error_is_unchanged():
    for error in (ValueError("rows"), BatchError("rows"), KeyError("x")):
        assert raised(error) is error


def test_an_error_of_a_module_becomes_its_nearest_portable_base():
    from probe_options import Mine

    got = raised(Mine("rows", 3))
    assert type(got) is LookupError
    assert str(got) == "probe_options.Mine: rows of 3"
    assert "in raised" in getattr(got, FAILURE).traceback
    assert getattr(got, FAILURE).classes[0] == ("probe_options", "Mine")


def test_an_error_that_cannot_be_pickled_is_described_as_text():
    got = raised(ValueError(lambda: 0))
    assert type(got) is ValueError
    assert "lambda" in str(got)
    assert type(raised(UnicodeDecodeError("utf-8", b"x", 0, 1, "odd"))) is UnicodeDecodeError


# -- on Ray -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="class")
def place(ray_session):
    """A placement group with one bundle."""
    cluster = RayVirtualCluster([1], use_gpus=False)
    yield cluster.get_placement_groups()[0]
    cluster.shutdown()


@pytest.mark.xdist_group("ray")
class TestOnRay:
    """Single workers, each created by its own initializer."""

    def test_a_handle_keeps_its_methods_when_sent_to_a_worker(self, place):
        env = {"env_vars": {"RANK": "0"}}
        worker = RayWorkerBuilder("probe_group_workers:Plain")(place, 0, 0, runtime_env=env)
        call = ray.remote(lambda handles: ray.get(handles[0].echo.remote(value=1)))
        assert ray.get(call.options(num_cpus=0).remote([worker])) == (0, {"value": 1})
        ray.kill(worker)

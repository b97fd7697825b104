"""Workers from an import path: how the class is found, which options win, and single workers on Ray."""

from __future__ import annotations

import copy
import sys

import pytest
import ray
from probe_options import OUTER

from rlframework.errors import BatchError
from rlframework.workers.ray.virtual_cluster import RayVirtualCluster
from rlframework.workers.ray.worker_actor import FAILURE, WorkerActor, portable
from rlframework.workers.ray.worker_builder import RayWorkerBuilder, recursive_merge_options, worker_options
from rlframework.workers.ray.worker_class import Configuration, Description, WorkerClassError, find_class, split_path

PLACE = {"num_gpus": 0.5, "placement_group": object(), "bundle": 3}
"""Where the worker of the tests without Ray goes; its options are only looked at."""


def described(**options):
    return Description("Worker", {}, options, is_async=False, configures=False)


# -- the class --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["a.b.C", "a.b:C"])
def test_both_ways_to_write_an_import_path_mean_the_same(path):
    assert split_path(path) == ("a.b", "C")


@pytest.mark.parametrize("path", ["C", "", "a:", ":C", "a b.C", "a..C"])
def test_what_is_no_import_path_is_told_in_the_driver(path):
    with pytest.raises(WorkerClassError, match="write module:Class"):
        RayWorkerBuilder(path)


def test_a_class_of_ray_remote_is_the_plain_one_and_its_options():
    plain, options = find_class("probe_options:Remote")
    assert plain().answer() == 42
    assert options == {"num_cpus": 2, "runtime_env": {"env_vars": {"A": "1"}}}
    assert find_class("probe_options.Plain") == (type(OUTER), {})


@pytest.mark.parametrize(
    ("path", "message"), [("probe_options:Nobody", "has no 'Nobody'"), ("probe_options:OUTER", "name a class")]
)
def test_what_is_no_class_is_told(path, message):
    with pytest.raises(WorkerClassError, match=message):
        find_class(path)


# -- options ----------------------------------------------------------------------------------------------------------


def test_options_are_merged_at_every_depth_and_neither_side_is_changed():
    below, above = {"a": {"x": 1, "y": {"z": 2}}, "b": 3}, {"a": {"y": {"w": 4}}, "b": {"c": 5}}
    before = copy.deepcopy((below, above))
    merged = recursive_merge_options(below, above)
    assert merged == {"a": {"x": 1, "y": {"z": 2, "w": 4}}, "b": {"c": 5}}
    merged["a"]["y"]["z"] = merged["b"]["c"] = 0
    assert (below, above) == before


def test_the_class_yields_to_the_caller_and_the_caller_to_configure_worker():
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


def test_the_place_of_a_worker_is_not_for_its_class_or_its_caller_to_choose():
    options = worker_options(described(num_gpus=8), {"scheduling_strategy": "SPREAD"}, Configuration(), **PLACE)
    assert options["num_gpus"] == 0.5
    assert options["scheduling_strategy"].placement_group_bundle_index == 3


def test_configure_worker_may_take_another_share_of_the_gpu():
    options = worker_options(described(), {}, Configuration({"num_gpus": 0}), **PLACE)
    assert options["num_gpus"] == 0


def test_what_ray_made_of_nsight_is_undone():
    options = worker_options(described(runtime_env={"_nsight": "default"}), {}, Configuration(), **PLACE)
    assert options["runtime_env"] == {"nsight": "default", "env_vars": {}}


# -- what a worker raises ---------------------------------------------------------------------------------------------


def raised(error):
    """What the driver gets of `error`, raised."""
    try:
        raise error
    except Exception as caught:  # noqa: BLE001 - it is what is looked at
        return portable(caught)


def test_an_error_that_every_process_knows_stays_itself():
    for error in (ValueError("rows"), BatchError("rows"), KeyError("x")):
        assert raised(error) is error


def test_an_error_of_a_module_becomes_the_nearest_that_every_process_knows():
    from probe_options import Mine

    got = raised(Mine("rows", 3))
    assert type(got) is LookupError
    assert str(got) == "probe_options.Mine: rows of 3"
    assert "in raised" in getattr(got, FAILURE).traceback
    assert getattr(got, FAILURE).classes[0] == ("probe_options", "Mine")


def test_an_error_that_cannot_be_sent_is_told_in_words():
    got = raised(ValueError(lambda: 0))
    assert type(got) is ValueError
    assert "lambda" in str(got)
    assert type(raised(UnicodeDecodeError("utf-8", b"x", 0, 1, "odd"))) is UnicodeDecodeError


def test_after_a_constructor_that_failed_every_call_fails_with_its_error():
    actor = WorkerActor()
    actor.load("probe_options:Plain", {})
    with pytest.raises(TypeError):
        actor.construct({}, ["unknown"], 1)
    with pytest.raises(TypeError):
        actor.call(("answer", True, [], [], []))


# -- on Ray -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="class")
def place(ray_session):
    """A placement group with one bundle."""
    cluster = RayVirtualCluster([1], use_gpus=False)
    yield cluster.get_placement_groups()[0]
    cluster.shutdown()


@pytest.mark.xdist_group("ray")
class TestOnRay:
    """Single workers, each made by an initializer of its own."""

    def test_a_worker_is_made_without_importing_its_module_and_gets_what_is_named(self, place, monkeypatch):
        monkeypatch.setenv("SECRET_OF_THE_DRIVER", "x")
        options = {"runtime_env": {"env_vars": {"RANK": "5", "GIVEN": "yes"}}}
        before = copy.deepcopy(options)
        worker = RayWorkerBuilder("probe_group_workers:Plain", "word", more=1)(place, 0, 0, **options)
        names = ["SECRET_OF_THE_DRIVER", "GIVEN", "RANK"]
        answer = ray.get(worker.variables.remote(names))
        assert answer == {"SECRET_OF_THE_DRIVER": None, "GIVEN": "yes", "RANK": "5"}
        assert ray.get(worker.variables.remote(names=names)) == answer
        assert options == before
        assert "probe_group_workers" not in sys.modules
        assert isinstance(worker, ray.actor.ActorHandle)
        with pytest.raises(AttributeError, match="has no method 'nothing'"):
            worker.nothing.remote()
        ray.kill(worker)

    def test_the_handle_comes_later_and_its_initializer_with_it(self, place):
        created, initializer = RayWorkerBuilder("probe_group_workers:Decorated").create_worker_async(
            place, 0, 0, runtime_env={"env_vars": {"FROM_BOTH": "caller"}}
        )
        worker = ray.get(created)
        names = ["FROM_CLASS", "FROM_BOTH"]
        assert ray.get(worker.variables.remote(names)) == {"FROM_CLASS": "class", "FROM_BOTH": "caller"}
        assert ray.get(worker.two.remote()) == [1, 2]  # as its `ray.method` says: two objects
        assert ray.get(worker.__ray_ready__.remote()) is True
        ray.kill(worker)
        ray.kill(initializer)

    def test_a_handle_keeps_its_methods_on_the_way_to_another_worker(self, place):
        env = {"env_vars": {"RANK": "0"}}
        worker = RayWorkerBuilder("probe_group_workers:Plain")(place, 0, 0, runtime_env=env)
        call = ray.remote(lambda handles: ray.get(handles[0].echo.remote(value=1)))
        assert ray.get(call.options(num_cpus=0).remote([worker])) == (0, {"value": 1})
        ray.kill(worker)

"""Dispatch over 2 x 2 workers: rank = 2 * data + tensor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlframework.base.errors import BatchError
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import MultiWorkerFuture
from rlframework.workers.dispatch import DispatchingWorkerGroup, select_results
from rlframework.workers.remote_group import RemoteWorkerGroup


class Planner(DispatchingWorkerGroup):
    """Returns its plans instead of calling anybody."""

    def _run(self, method_name, plan):
        return plan

    def get_all_worker_results(self, future):
        raise NotImplementedError

    shutdown = get_all_worker_results


GROUP = Planner(NamedSharding([[0, 1], [2, 3]], ["data", "tensor"]))


def plan(kwargs, **options):
    found = GROUP.run_all_workers_sharded_data("method", **options, **kwargs)
    return dict(zip(found.called, found.kwargs, strict=True)), found.returned


@pytest.mark.parametrize(
    ("axes", "called"),
    [(None, [0, 1, 2, 3]), (["tensor"], [0, 2]), (["data"], [0, 1]), (["data", "tensor"], [0]), ([], [0, 1, 2, 3])],
)
def test_the_same_data_to_all_or_to_rank_0_of_axes(axes, called):
    found = GROUP.run_all_workers_single_data("method", run_rank_0_only_axes=axes, x=1)
    assert found.called == found.returned == called
    assert found.kwargs == [{"x": 1}] * len(called)


@pytest.mark.parametrize("method", ["all_workers_single", "all_workers_multiple", "all_workers_sharded"])
def test_positional_arguments_are_a_type_error_that_says_to_use_keywords(method):
    with pytest.raises(TypeError, match="name=value") as told:
        getattr(GROUP, f"run_{method}_data")("method", [1, 2])
    assert isinstance(told.value, AssertionError)  # as in NeMo-RL
    with pytest.raises(TypeError, match="name=value"):
        GROUP.run_single_worker_single_data("method", 0, 1)


def test_one_worker_alone():
    found = GROUP.run_single_worker_single_data("method", 2, x=1)
    assert (found.called, found.kwargs, found.returned) == ([2], [{"x": 1}], [2])
    for worker in (-1, 4):
        with pytest.raises(IndexError, match=rf"no worker {worker} in a group of 4: use 0\.\.3"):
            GROUP.run_single_worker_single_data("method", worker)


def test_multiple_data_by_worker():
    found = GROUP.run_all_workers_multiple_data("method", common_kwargs={"y": 7}, x=list("abcd"), z=(1, 2, 3, 4))
    assert found.called == found.returned == [0, 1, 2, 3]
    assert found.kwargs == [{"x": x, "z": z, "y": 7} for x, z in zip("abcd", (1, 2, 3, 4), strict=True)]
    found = GROUP.run_all_workers_multiple_data("method", run_rank_0_only_axes=["tensor"], x=["a", "b"])
    assert found.called == found.returned == [0, 2]
    assert found.kwargs == [{"x": "a"}, {"x": "b"}]


@pytest.mark.parametrize(
    ("kwargs", "axes", "message"),
    [
        ({}, None, "needs at least one argument with an entry for each worker"),
        ({"x": list("abc")}, None, "'x' must be a list of 4 entries, one for each called worker; got 3 entries"),
        ({"x": list("abcd"), "y": [1]}, None, "'y' must be a list of 4 entries.*got 1 entries"),
        ({"x": "abcd"}, None, "'x' must be a list of 4 entries.*got a str"),
        ({"x": list("abcd")}, ["tensor"], "'x' must be a list of 2 entries.*got 4 entries"),
    ],
)
def test_multiple_data_of_the_wrong_length(kwargs, axes, message):
    with pytest.raises(BatchError, match=message) as told:
        GROUP.run_all_workers_multiple_data("method", run_rank_0_only_axes=axes, **kwargs)
    assert isinstance(told.value, AssertionError)  # as in NeMo-RL


def test_sharded_and_replicated_with_one_result_per_shard():
    calls, kept = plan(
        {"x": ["a", "b"]},
        in_sharded_axes=["data"],
        replicate_on_axes=["tensor"],
        output_is_replicated=["tensor"],
        common_kwargs={"y": 7},
    )
    assert calls == {0: {"x": "a", "y": 7}, 1: {"x": "a", "y": 7}, 2: {"x": "b", "y": 7}, 3: {"x": "b", "y": 7}}
    assert kept == [0, 2]


def test_two_sharded_axes_index_in_the_given_order():
    nested = [["a", "b"], ["c", "d"]]
    calls, kept = plan({"x": nested}, in_sharded_axes=["data", "tensor"])
    assert [calls[worker]["x"] for worker in range(4)] == ["a", "b", "c", "d"]
    assert kept == [0, 1, 2, 3]
    calls, _ = plan({"x": nested}, in_sharded_axes=["tensor", "data"])
    assert [calls[worker]["x"] for worker in range(4)] == ["a", "c", "b", "d"]


@pytest.mark.parametrize("dummy", [False, True])
def test_free_axis_calls_only_coordinate_0_or_the_others_with_none(dummy):
    calls, kept = plan(
        {"x": ["a", "b"]}, in_sharded_axes=["data"], make_dummy_calls_to_free_axes=dummy, common_kwargs={"y": 1}
    )
    others = {1: {"x": None, "y": 1}, 3: {"x": None, "y": 1}} if dummy else {}
    assert calls == {0: {"x": "a", "y": 1}, 2: {"x": "b", "y": 1}, **others}
    assert kept == [0, 2]


def test_conflicting_and_unknown_axes():
    with pytest.raises(ValueError, match=r"both sharded and replicated: \['data'\]"):
        plan({}, in_sharded_axes=["data"], replicate_on_axes=["data"])
    for option in ("in_sharded_axes", "replicate_on_axes", "output_is_replicated"):
        with pytest.raises(ValueError, match="Axis 'pipeline' not found"):
            plan({}, **{option: ["pipeline"]})
    with pytest.raises(ValueError, match="Axis 'pipeline' not found"):
        GROUP.run_all_workers_single_data("method", run_rank_0_only_axes=["pipeline"])
    with pytest.raises(TypeError, match="a list of names, got the string 'data'"):
        plan({}, in_sharded_axes="data")


@pytest.mark.parametrize(
    ("value", "axes", "message"),
    [
        (["a"], ["data"], "'x' has 1 entries; axis 'data' needs 2"),
        (["a", "b", "c"], ["data"], "'x' has 3 entries; axis 'data' needs 2"),
        ("ab", ["data"], "must be a list of 2 entries, got a str"),
        (None, ["data"], "must be a list of 2 entries, got a NoneType"),
        ([["a", "b"], ["c"]], ["data", "tensor"], "'x' has 1 entries; axis 'tensor' needs 2"),
    ],
)
def test_wrong_number_of_shards(value, axes, message):
    with pytest.raises(BatchError, match=message):
        plan({"x": value}, in_sharded_axes=axes)


def test_select_results():
    future = MultiWorkerFuture(["a", "b", "c"], return_from_workers=[5, 1], called_workers=[1, 3, 5])
    assert select_results(future, ["A", "B", "C"]) == ["C", "A"]
    assert select_results(MultiWorkerFuture([0, 0]), ["A", "B"]) == ["A", "B"]
    assert select_results(MultiWorkerFuture([0, 0], return_from_workers=[1, 7]), ["A", "B"]) == ["B"]


def test_only_what_several_workers_get_is_stored() -> None:
    """An argument that one worker gets twice, as the same empty tuple, is sent with its call."""
    stored: list[object] = []
    group = SimpleNamespace(_shared=lambda value: stored.append(value) or "reference")
    empty, both, own = (), ["both"], ["own"]
    given = [{"first": empty, "second": empty, "third": both}, {"third": both, "fourth": own}]
    assert RemoteWorkerGroup._store_shared(group, given) == {id(both): "reference"}  # type: ignore[arg-type]
    assert stored == [both]

"""The layout of ranks over named axes."""

from __future__ import annotations

import numpy as np
import pytest

from rlframework.base.errors import ConfigError
from rlframework.config.policy import ParallelismConfig
from rlframework.interfaces.named_sharding import POLICY_AXES, NamedSharding, policy_sharding


@pytest.fixture
def grid():
    return NamedSharding([[0, 1, 2], [3, 4, 5]], ["dp", "tp"])


def test_shape_and_names_are_copies(grid):
    assert (grid.shape, grid.names, grid.ndim, grid.size) == ({"dp": 2, "tp": 3}, ["dp", "tp"], 2, 6)
    assert (grid.get_axis_index("tp"), grid.get_axis_size("tp")) == (1, 3)
    grid.names.append("x")
    grid.layout[0, 0] = 99
    assert grid == NamedSharding(np.arange(6).reshape(2, 3), ["dp", "tp"])


@pytest.mark.parametrize(
    ("coordinates", "ranks"),
    [({"tp": 1}, [1, 4]), ({"dp": 1, "tp": 0}, [3]), ({}, [0, 1, 2, 3, 4, 5]), ({"tp": 3}, []), ({"tp": -1}, [])],
)
def test_ranks_of_coordinates(grid, coordinates, ranks):
    assert grid.get_ranks_by_coord(**coordinates) == ranks


def test_ranks_are_sorted():
    assert NamedSharding([[5, 1], [4, 0]], ["a", "b"]).get_ranks_by_coord(b=1) == [0, 1]
    assert NamedSharding([[5, 1], [4, 0]], ["a", "b"]).get_ranks_by_coord(b=0) == [4, 5]


def test_coordinates_and_sub_layouts(grid):
    assert grid.get_worker_coords(5) == {"dp": 1, "tp": 2}
    assert grid.get_ranks(dp=1) == NamedSharding([3, 4, 5], ["tp"])
    assert grid.get_ranks(dp=1, tp=1) == 4
    assert grid.get_ranks() == grid
    with pytest.raises(IndexError, match="coordinate 2 on axis 'dp' of size 2"):
        grid.get_ranks(dp=2)


@pytest.mark.parametrize(
    ("ask", "problem"),
    [
        (lambda grid: grid.get_axis_index("pp"), r"Axis 'pp' not found; the axes are \['dp', 'tp'\]"),
        (lambda grid: grid.get_axis_size("pp"), "Axis 'pp' not found"),
        (lambda grid: grid.get_ranks(pp=0), "Axis 'pp' not found"),
        (lambda grid: grid.get_ranks_by_coord(pp=0), "Axis 'pp' not found"),
        (lambda grid: grid.get_worker_coords(6), "rank 6 is not in the layout"),
    ],
)
def test_unknown_axes_and_ranks_are_named(grid, ask, problem):
    with pytest.raises(ValueError, match=problem):
        ask(grid)


@pytest.mark.parametrize(
    ("layout", "names", "message"),
    [
        ([0, 1.5], ["a"], "only integer rank IDs"),
        (["x", "y"], ["a"], "only integer rank IDs"),
        ([float("nan"), 1.0], ["a"], "only integer rank IDs"),
        ([True, False], ["a"], "only integer rank IDs"),
        ([[0, 1], [2]], ["a", "b"], "ragged"),
        ([0, 1], ["a", "b"], "1 dimensions needs as many distinct names"),
        ([[0], [1]], ["a", "a"], "distinct names"),
        ([3, 1, 3], ["a"], r"Duplicate ranks found in the layout: \[3\]"),
    ],
)
def test_bad_layouts(layout, names, message):
    with pytest.raises(ValueError, match=message):
        NamedSharding(layout, names)


def test_equality():
    one = NamedSharding([0, 1], ["a"])
    assert one == NamedSharding(np.array([0.0, 1.0]), ["a"])  # whole floats are ranks
    assert hash(one) == hash(NamedSharding(np.array([0, 1]), ["a"]))
    assert one not in (NamedSharding([1, 0], ["a"]), NamedSharding([0, 1], ["b"]), "a")


def test_is_axis_zero():
    assert NamedSharding.is_axis_zero({"a": 0, "b": 1}, ["a"])
    assert not NamedSharding.is_axis_zero({"a": 0, "b": 1}, ["a", "b"])
    assert NamedSharding.is_axis_zero({"a": 1}, [])


def test_policy_sharding_puts_tensor_innermost_and_pipeline_outermost():
    sharding = policy_sharding(8, ParallelismConfig(tensor=2, pipeline=2))
    assert (sharding.names, list(sharding.shape.values())) == (list(POLICY_AXES), [2, 2, 1, 2])
    # rank = pipeline * 4 + data * 2 + tensor
    coordinates = {"pipeline": 1, "data": 0, "context": 0, "tensor": 1}
    assert sharding.get_worker_coords(5) == {f"{axis}_parallel": place for axis, place in coordinates.items()}
    with pytest.raises(ConfigError, match=r"6 workers cannot hold whole replicas.*takes 4 workers each"):
        policy_sharding(6, ParallelismConfig(tensor=2, context=2))

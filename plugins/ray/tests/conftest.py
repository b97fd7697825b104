"""One group with two workers, for the tests of a file that leave it usable."""

from __future__ import annotations

import pytest
from kept_ray_groups import Keeper


@pytest.fixture(scope="module")
def keeper(ray_session):
    keeper = Keeper()
    yield keeper
    keeper.end()
    assert keeper.cluster.shutdown()


@pytest.fixture
def group(keeper):
    return keeper.give()


@pytest.fixture
def make(keeper):
    """`make(path, *args, options={...}, **kwargs)`: see `Keeper.make`."""
    yield keeper.make
    keeper.end()

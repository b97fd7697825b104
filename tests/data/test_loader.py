"""The prompt loader: epochs, batches that span them, and going on in the middle."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlframework.data.loader import PromptLoader
from rlframework.errors import DataError
from rlframework.interfaces.environment import Sample


def samples(count: int) -> list[Sample]:
    return [Sample(str(index), (), "") for index in range(count)]


def take(loader: PromptLoader, batches: int) -> list[list[str]]:
    return [[sample.id for sample in next(loader)] for _ in range(batches)]


@given(st.integers(1, 12), st.integers(1, 30), st.integers(1, 12), st.integers(0, 9))
def test_every_epoch_has_every_sample_once(count: int, batch_size: int, batches: int, seed: int) -> None:
    loader = PromptLoader(samples(count), batch_size, seed)
    taken = take(loader, batches)
    assert all(len(batch) == batch_size for batch in taken)
    stream = [identity for batch in taken for identity in batch]
    for start in range(0, len(stream) - count + 1, count):
        assert Counter(stream[start : start + count]) == Counter(str(index) for index in range(count))
    assert loader.epoch == (len(stream) - 1) // count


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 9), st.integers(0, 9))
def test_it_goes_on_where_it_was(count: int, batch_size: int, before: int, after: int) -> None:
    first = PromptLoader(samples(count), batch_size, 3)
    take(first, before)
    state = json.loads(json.dumps(first.state_dict()))
    expected = take(first, after)
    resumed = PromptLoader(samples(count), batch_size, 3)
    take(resumed, 1)
    resumed.load_state_dict(state)
    assert take(resumed, after) == expected


def test_order_by_seed_and_epoch() -> None:
    taken = [take(PromptLoader(samples(50), 50, seed), 2) for seed in (0, 0, 1)]
    assert taken[0] == taken[1]
    assert taken[0][0] != taken[0][1]
    assert taken[0][0] != taken[2][0]
    assert taken[0][0] != [str(index) for index in range(50)]


def test_refusals() -> None:
    with pytest.raises(DataError, match="the data set is empty"):
        PromptLoader([], 4, 0)
    with pytest.raises(DataError, match="batch_size is 0"):
        PromptLoader(samples(3), 0, 0)
    state = PromptLoader(samples(3), 2, 0).state_dict()
    with pytest.raises(DataError, match="was for samples = 3, here it is 4"):
        PromptLoader(samples(4), 2, 0).load_state_dict(state)
    with pytest.raises(DataError, match="was for seed = 0, here it is 1"):
        PromptLoader(samples(3), 2, 1).load_state_dict(state)

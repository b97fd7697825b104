"""The prompt loader: epochs, batches that span them, and going on in the middle."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.base.errors import DataError
from rlframework.datasets.loader import PromptLoader, Source, shuffled
from rlframework.interfaces.environment import Sample


def samples(count: int) -> list[Sample]:
    return [Sample(str(index), (), "") for index in range(count)]


def take(loader: PromptLoader, batches: int) -> list[list[str]]:
    return [[sample.id for sample in next(loader)] for _ in range(batches)]


@pytest.mark.slow
@given(st.integers(1, 12), st.integers(1, 30), st.integers(1, 12), st.integers(0, 9))
def test_every_epoch_has_every_sample_once(count: int, batch_size: int, batches: int, seed: int) -> None:
    loader = PromptLoader(samples(count), batch_size, seed)
    taken = take(loader, batches)
    assert all(len(batch) == batch_size for batch in taken)
    stream = [identity for batch in taken for identity in batch]
    for start in range(0, len(stream) - count + 1, count):
        assert Counter(stream[start : start + count]) == Counter(str(index) for index in range(count))
    assert loader.epoch == (len(stream) - 1) // count


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(st.integers(1, 20), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), max_size=6), st.integers(0, 9))
def test_stopping_anywhere_changes_nothing_even_with_another_batch_size(count: int, parts, seed: int) -> None:
    """Some batches of one size, a stop, some of another, and so on: the rows are those of one run without a stop."""
    rows = [str(index) for index in range(count)]
    taken: list[str] = []
    state = None
    for batch_size, batches in parts:
        loader = PromptLoader(rows, batch_size, seed)
        if state is not None:
            loader.load_state_dict(json.loads(state))
        for _ in range(batches):
            taken += next(loader)
        state = json.dumps(loader.state_dict())
    unbroken = PromptLoader(rows, 1, seed)
    assert taken == [row for _ in taken for row in next(unbroken)]


def test_the_order_is_the_same_for_ever() -> None:
    """Made by hand: the bits of PCG64 for [seed, epoch], the lowest three replaced by the number, and sorted."""
    bits = np.random.PCG64([4, 2]).random_raw(6)
    keys = sorted(int(word) // 8 * 8 + number for number, word in enumerate(bits))
    assert shuffled(6, 4, 2).tolist() == [key % 8 for key in keys]
    assert shuffled(1, 0, 0).tolist() == [0]
    assert sorted(shuffled(2, -3, 0).tolist()) == [0, 1]


@pytest.mark.slow
def test_every_order_is_as_likely() -> None:
    """The six orders of three rows over 6,000 epochs: 1,000 each, and 5 standard deviations are 144."""
    orders = Counter(tuple(shuffled(3, 0, epoch).tolist()) for epoch in range(6000))
    assert len(orders) == 6
    assert all(abs(count - 1000) < 144 for count in orders.values())


def test_memory_is_eight_bytes_a_row() -> None:
    tracemalloc.start()
    try:
        loader = PromptLoader(range(2_000_000), 4, 0)
        next(loader)
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now < 17 << 20
    assert peak < 50 << 20


def test_a_batch_of_more_than_all_rows_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    PromptLoader(range(76), 76, 0)
    assert not caplog.records
    PromptLoader(range(76), 500, 0)
    assert "a step takes 500 samples, but there are only 76 to train on: each 6.6 times" in caplog.text


def test_refusals() -> None:
    with pytest.raises(DataError, match="the data set is empty"):
        PromptLoader([], 4, 0)
    with pytest.raises(DataError, match="batch_size is 0"):
        PromptLoader(samples(3), 0, 0)
    state = PromptLoader(samples(3), 2, 0).state_dict()
    with pytest.raises(DataError, match="is for samples = 3, not 4"):
        PromptLoader(samples(4), 2, 0).load_state_dict(state)
    with pytest.raises(DataError, match="is for seed = 0, not 1"):
        PromptLoader(samples(3), 2, 1).load_state_dict(state)
    old = {name: state[name] for name in ("epoch", "position", "seed", "samples")}
    with pytest.raises(DataError, match="from a release that shuffles with None"):
        PromptLoader(samples(3), 2, 0).load_state_dict(old)


MIXTURE = (Source("a", 0.5, 6), Source("b", 0.3, 2), Source("c", 0.2, 3))


def test_each_row_of_a_mixture_is_of_the_source_furthest_behind() -> None:
    """By hand, with weights 5, 3, 2: the largest of weight x drawn - 10 x rows of the source, the first of several."""
    loader = PromptLoader("aaaaaabbccc", 1, 0, MIXTURE)
    assert "".join(next(loader)[0] for _ in range(10)) == "abcaabacba"
    assert loader.pop_metrics() == {
        "train/epoch": 10 / 11,
        "train/epoch/a": 5 / 6,
        "train/rows/a": 5.0,
        "train/epoch/b": 3 / 2,
        "train/rows/b": 3.0,
        "train/epoch/c": 2 / 3,
        "train/rows/c": 2.0,
    }
    next(loader)
    assert loader.pop_metrics()["train/rows/a"] == 1.0


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0.001, 1e6), st.integers(1, 9)), min_size=1, max_size=5), st.integers(1, 60))
def test_shares_and_epochs_of_the_sources(sources: list[tuple[float, int]], count: int) -> None:
    mixture = [Source(f"s{number}", weight, rows) for number, (weight, rows) in enumerate(sources)]
    rows = [(source.name, row) for source in mixture for row in range(source.rows)]
    loader = PromptLoader(rows, count, 5, mixture)
    drawn = next(loader)
    total = sum(source.weight for source in mixture)
    for source in mixture:
        own = [row for name, row in drawn if name == source.name]
        share = count * source.weight / total
        assert -max(1, len(mixture) - 1) < len(own) - share + 1e-9
        assert len(own) - share < 1 + 1e-9
        for start in range(0, len(own) - source.rows + 1, source.rows):
            assert sorted(own[start : start + source.rows]) == list(range(source.rows))


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), max_size=6))
def test_a_mixture_is_resumed_anywhere(parts: list[tuple[int, int]]) -> None:
    rows, taken, state = list(range(11)), list[int](), None
    for batch_size, batches in parts:
        loader = PromptLoader(rows, batch_size, 4, MIXTURE)
        if state is not None:
            loader.load_state_dict(json.loads(state))
        for _ in range(batches):
            taken += next(loader)
        state = json.dumps(loader.state_dict())
    unbroken = PromptLoader(rows, 1, 4, MIXTURE)
    assert taken == [row for _ in taken for row in next(unbroken)]


def test_sources_of_the_same_size_have_orders_of_their_own() -> None:
    loader = PromptLoader(range(40), 40, 0, [Source("a", 1.0, 20), Source("b", 1.0, 20)])
    drawn = next(loader)
    assert drawn[0::2] == shuffled(20, 0, 0).tolist()
    assert [row - 20 for row in drawn[1::2]] == shuffled(20, 0, 0, 1).tolist() != drawn[0::2]


def test_a_mixture_that_does_not_fit() -> None:
    with pytest.raises(DataError, match="the sources of the mixture have 11 rows, but there are 10 samples"):
        PromptLoader(range(10), 1, 0, MIXTURE)
    state = PromptLoader(range(11), 1, 0, MIXTURE).state_dict()
    other = [*MIXTURE[:2], Source("c", 0.3, 3)]
    with pytest.raises(DataError, match=r"is for mixture = .*'weight': 0\.2.*, not .*'weight': 0\.3"):
        PromptLoader(range(11), 1, 0, other).load_state_dict(state)
    with pytest.raises(DataError, match=r"is for mixture = .*, not None"):
        PromptLoader(range(11), 1, 0).load_state_dict(state)


def test_how_far_into_the_epochs_a_run_is() -> None:
    loader = PromptLoader(range(4), 3, 0)
    epochs = []
    for _ in range(3):
        next(loader)
        epochs.append(loader.pop_metrics())
    assert epochs == [{"train/epoch": 0.75}, {"train/epoch": 1.5}, {"train/epoch": 2.25}]

"""The prompt loader: epochs, batches that span them, and going on in the middle."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.base.errors import DataError
from rlframework.datasets.loader import PromptLoader, Source, shuffled

MIXTURE = (Source("a", 0.5, 6), Source("b", 0.3, 2), Source("c", 0.2, 3))
PARTS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), max_size=6)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(PARTS, st.integers(0, 9), st.booleans())
def test_stopping_anywhere_changes_nothing(parts: list[tuple[int, int]], seed: int, mixed: bool) -> None:
    """Some batches of one size, a stop, some of another, and so on: the rows are those of one run without a stop."""
    rows, mixture = list(range(11)), MIXTURE if mixed else ()
    drawn, state = list[int](), None
    for batch_size, batches in parts:
        loader = PromptLoader(rows, batch_size, seed, mixture)
        if state is not None:
            loader.load_state_dict(json.loads(state))
        for _ in range(batches):
            drawn += next(loader)
        state = json.dumps(loader.state_dict())
    unbroken = PromptLoader(rows, 1, seed, mixture)
    assert drawn == [row for _ in drawn for row in next(unbroken)]


def test_the_order_is_the_same_for_ever() -> None:
    """Made by hand: the bits of PCG64 for [seed, epoch], the lowest three replaced by the number, and sorted."""
    bits = np.random.PCG64([4, 2]).random_raw(6)
    keys = sorted(int(word) // 8 * 8 + number for number, word in enumerate(bits))
    assert shuffled(6, 4, 2).tolist() == [key % 8 for key in keys]
    assert shuffled(1, 0, 0).tolist() == [0]
    assert sorted(shuffled(2, -3, 0).tolist()) == [0, 1]


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


@pytest.mark.parametrize(
    ("rows", "batch_size", "mixture", "problem"),
    [
        (0, 4, (), "the data set is empty"),
        (3, 0, (), "batch_size is 0"),
        (10, 1, MIXTURE, "the sources of the mixture have 11 rows, but there are 10 samples"),
    ],
)
def test_rows_that_cannot_be_drawn_are_rejected(rows, batch_size, mixture, problem) -> None:
    with pytest.raises(DataError, match=problem):
        PromptLoader(range(rows), batch_size, 0, mixture)


@pytest.mark.parametrize(
    ("changes", "rows", "seed", "mixture", "problem"),
    [
        ({}, 4, 0, (), "is for samples = 11, not 4"),
        ({}, 11, 1, MIXTURE, "is for seed = 0, not 1"),
        ({"shuffle": None}, 11, 0, MIXTURE, "from a release that shuffles with None"),
        ({}, 11, 0, (*MIXTURE[:2], Source("c", 0.3, 3)), r"is for mixture = .*'weight': 0\.2.*, not .*'weight': 0\.3"),
        ({}, 11, 0, (), r"is for mixture = .*, not None"),
    ],
)
def test_a_state_of_other_rows_is_rejected(changes, rows, seed, mixture, problem) -> None:
    state = PromptLoader(range(11), 2, 0, MIXTURE).state_dict()
    with pytest.raises(DataError, match=problem):
        PromptLoader(range(rows), 2, seed, mixture).load_state_dict({**state, **changes})


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


def test_sources_of_the_same_size_have_orders_of_their_own() -> None:
    loader = PromptLoader(range(40), 40, 0, [Source("a", 1.0, 20), Source("b", 1.0, 20)])
    drawn = next(loader)
    assert drawn[0::2] == shuffled(20, 0, 0).tolist()
    assert [row - 20 for row in drawn[1::2]] == shuffled(20, 0, 0, 1).tolist() != drawn[0::2]

"""The prompt loader and its curriculum: epochs, mixtures, bands of difficulty, and going on in the middle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.base.errors import ConfigError, DataError
from rlframework.config.algorithms import CurriculumConfig
from rlframework.datasets.curriculum import Curriculum
from rlframework.datasets.loader import PromptLoader, Source, shuffled
from rlframework.interfaces.environment import Sample

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


def curriculum(rows: int, *, delay: int = 1, **keys: Any) -> Curriculum:
    return Curriculum(PromptLoader(range(rows), 1, 7), rows, CurriculumConfig(**keys), delay=delay)


def passes(prompts: Curriculum, step: int, lengths: list[int]) -> list[list[int]]:
    return [sorted(prompts.draw(step) for _ in range(length)) for length in lengths]


def test_a_prompt_outside_of_the_band_comes_back_after_some_passes() -> None:
    prompts = curriculum(4, skip_epochs=2)
    assert passes(prompts, 1, [4]) == [[0, 1, 2, 3]]
    prompts.note(1, [(0, 0.0), (1, 0.05), (2, 1.0), (3, 0.5)])
    found = {name: value for name, value in prompts.pop_metrics().items() if "prompts" in name}
    assert found == {
        "train/prompts_too_easy": 1.0,
        "train/prompts_too_hard": 2.0,
        "train/prompts_in_band": 1.0,
        "train/prompts_skipped": 0.0,
    }
    assert passes(prompts, 2, [1, 1, 4]) == [[3], [3], [0, 1, 2, 3]]
    assert prompts.pop_metrics()["train/prompts_skipped"] == 6.0
    prompts.note(2, [(0, 0.1), (1, 0.9)])  # the ends of the band are in it; 2 and 3 have no newer measurement
    assert passes(prompts, 3, [4]) == [[0, 1, 2, 3]]


def test_what_is_drawn_does_not_depend_on_when() -> None:
    """With a delay of 2, a step's prompts may be drawn before or after the step before it is measured."""

    def drawn(*, early: bool) -> list[list[int]]:
        prompts, found = curriculum(6, delay=2, skip_epochs=1), dict[int, list[int]]()

        def draw(step: int) -> None:
            found.setdefault(step, [prompts.draw(step) for _ in range(3)]) if step not in found else None

        for step in range(1, 9):
            draw(step)
            if early:
                draw(step + 1)
            prompts.note(step, [(row, (row + step) % 3 / 2) for row in found[step]])
        return [found[step] for step in range(1, 9)]

    assert drawn(early=True) == drawn(early=False)
    everything, flat = curriculum(6), [row for rows in drawn(early=True) for row in rows]
    assert flat != [everything.draw(1) for _ in flat]


def test_a_saved_curriculum_goes_on_alike() -> None:
    whole: list[Any] = []
    parts: list[Any] = []
    for target, saves in ((whole, False), (parts, True)):
        prompts = curriculum(5, delay=2, skip_epochs=1)
        for step in range(1, 8):
            rows = [prompts.draw(step) for _ in range(3)]
            prompts.note(step, [(row, (row + step) % 3 / 2) for row in rows])
            target.append((rows, prompts.pop_metrics()))
            if saves:
                state = json.loads(json.dumps(prompts.state_dict()))
                prompts = curriculum(5, delay=2, skip_epochs=1)
                prompts.load_state_dict(state)
    assert whole == parts


def test_a_band_that_is_empty_is_told_where_steps_and_passes_do_not_align(caplog: pytest.LogCaptureFixture) -> None:
    """No draw passes over all prompts at once, because a pass begins within a step."""
    prompts = curriculum(80, skip_epochs=1)
    for step in range(1, 9):
        assert len(caplog.records) == (step > 4)
        prompts.note(step, [(prompts.draw(step), 0.0) for _ in range(24)])
    (warning,) = caplog.records
    message = warning.getMessage()
    assert "step 4: none of the 80 prompts is in the band" in message
    assert "(0 too easy, 80 too hard by the mean accuracy" in message
    assert "lower min_success, or remove it (`~algorithm.curriculum`)" in message


def measured(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "completions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


SAMPLES = [Sample(name, ({"role": "user", "content": name},), "") for name in "abc"]


def test_it_starts_from_an_evaluation(tmp_path: Path) -> None:
    """The mean of a's attempts is 0.5, b is always right, c was not evaluated."""
    rows = [("a", 1.0), ("a", 0.0), ("b", 1.0), ("b", 1.0), ("other", 0.0)]
    path = measured(tmp_path, [{"id": name, "accuracy": accuracy} for name, accuracy in rows])
    prompts = curriculum(3, skip_epochs=2)
    prompts.start_from(path, SAMPLES)
    assert passes(prompts, 1, [2, 2, 3]) == [[0, 2], [0, 2], [0, 1, 2]]
    assert prompts.pop_metrics()["train/prompts_in_band"] == 1.0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": name, "accuracy": 1.0} for name in "abc"], "of 3, 3 are too easy and 0 too hard by"),
        ([{"id": "x", "accuracy": 1.0}], "its first id is 'x', that of the split is 'a'; evaluate with --split train"),
        ([{"id": "a"}], r"completions.jsonl.*needs an `id` and a number as `accuracy`"),
    ],
)
def test_measurements_that_leave_nothing_are_rejected(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        curriculum(3).start_from(measured(tmp_path, rows), SAMPLES)


def test_a_band_that_no_prompt_can_be_in_is_rejected(run_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"with samples_per_prompt=1 no prompt can have a success from .*=0\.1 to"):
        run_config("grpo", "algorithm={name: ppo, samples_per_prompt: 1, curriculum: {}}")
    with pytest.raises(ConfigError, match=r"min_success is 0\.95, but must be at most max_success = 0\.9"):
        run_config("grpo", "algorithm.curriculum={min_success: 0.95}")

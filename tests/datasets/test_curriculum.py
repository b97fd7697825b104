"""The curriculum: which prompts are drawn after which measurements, however early they are drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlframework.base.errors import ConfigError, DataError
from rlframework.config.algorithms import CurriculumConfig
from rlframework.datasets.curriculum import Curriculum
from rlframework.datasets.loader import PromptLoader
from rlframework.interfaces.environment import Sample


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

"""Preference pairs as an environment: layouts of rows, splits, and errors that name the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlframework.base.errors import DataError
from rlframework.datasets.sources.memory import given_rows
from rlframework.interfaces.environment import Sample
from rlframework_preferences.config import PreferencesConfig
from rlframework_preferences.preference_samples import PreferencesEnvironment

SOLUTIONS = Path(__file__).parents[3] / "tests/fixtures" / "gsm8k_model_solutions.jsonl"


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def opened(path: str, seed: int = 0, **keys: Any) -> PreferencesEnvironment:
    return PreferencesEnvironment(PreferencesConfig(path=path, **keys), seed=seed)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def row(number: int) -> dict[str, Any]:
    return {"prompt": f"{number}?", "chosen": "yes", "rejected": "no"}


def parts(sample: Sample) -> tuple[list[str], str, str]:
    return [str(message["content"]) for message in sample.messages], sample.completion, sample.metadata["rejected"]


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": "1?", "chosen": "yes", "rejected": "no"},
        {"prompt": [turn("user", "1?")], "chosen": [turn("assistant", "yes")], "rejected": [turn("assistant", "no")]},
        {
            "chosen": [turn("user", "1?"), turn("assistant", "yes")],
            "rejected": [turn("user", "1?"), turn("assistant", "no")],
        },
    ],
)
def test_layouts(tmp_path: Path, given: dict[str, Any]) -> None:
    path = write(tmp_path / "a.jsonl", [given])
    held_out = write(tmp_path / "v.jsonl", [row(2)])
    environment = opened(path, validation_path=held_out, instruction=" Answer.", system_prompt="Be brief.")
    [sample] = environment.samples("train")
    assert parts(sample) == (["Be brief.", "1? Answer."], "yes", "no")
    assert sample.id == "a-1"
    assert [parts(sample)[0][1] for sample in environment.samples("validation")] == ["2? Answer."]
    assert not environment.scores


def test_columns_of_other_names(tmp_path: Path) -> None:
    rows = [
        {"instruction": "1?", "better": 5, "worse": "no"},
        row(2) | {"instruction": "3?", "better": "a", "worse": "b"},
    ]
    columns = {"prompt": "instruction", "chosen": "better", "rejected": "worse"}
    environment = opened(write(tmp_path / "a.jsonl", rows), columns=columns)
    samples = [*environment.samples("train"), *environment.samples("validation")]
    assert sorted(map(parts, samples)) == [(["1?"], "5", "no"), (["3?"], "a", "b")]


def test_graded_solutions_have_one_independent_pair_per_question_in_validation() -> None:
    environment = opened(str(SOLUTIONS), validation_fraction=0.34, seed=1)
    train, validation = environment.samples("train"), environment.samples("validation")
    questions = [parts(sample)[0][-1] for sample in validation]
    assert len(set(questions)) == len(questions) == 2  # of the six with right and wrong solutions
    assert {parts(sample)[0][-1] for sample in train}.isdisjoint(questions)
    everything = opened(str(SOLUTIONS), validation_fraction=0.34, seed=1, pairs="one").samples("train")
    assert len(everything) == 4 < len(train)


def test_prompts_of_validation_are_never_trained_on(tmp_path: Path) -> None:
    rows = [
        row(number % 10) | {"prompt": f"How  MUCH {number % 10}?" if number > 9 else f"how much {number}?"}
        for number in range(20)
    ]
    environment = opened(write(tmp_path / "a.jsonl", rows), validation_fraction=0.3)
    assert len(environment.samples("validation")) == 6
    assert len(environment.samples("train")) == 14
    again = opened(write(tmp_path / "a.jsonl", rows), validation_fraction=0.3)
    assert again.samples("validation") == environment.samples("validation")
    other = opened(write(tmp_path / "a.jsonl", rows), validation_fraction=0.3, seed=5)
    assert other.samples("validation") != environment.samples("validation")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"prompt": "1?", "chosen": "yes"}, "a.jsonl, line 2: there is no 'rejected'"),
        ({"chosen": "yes", "rejected": "no"}, "a.jsonl, line 2, column 'chosen': the answer has no prompt before it"),
        (
            {
                "chosen": [turn("user", "1?"), turn("assistant", "yes")],
                "rejected": [turn("user", "2?"), turn("assistant", "no")],
            },
            "a.jsonl, line 2: 'chosen' and 'rejected' have different prompts",
        ),
        (
            {"prompt": "1?", "chosen": [turn("user", "yes")], "rejected": "no"},
            "a.jsonl, line 2, column 'chosen': must end with one turn of the assistant",
        ),
    ],
)
def test_rows_that_are_no_pairs_are_named(tmp_path: Path, given: dict[str, Any], problem: str) -> None:
    path = write(tmp_path / "a.jsonl", [row(1), given])
    with pytest.raises(DataError) as raised:
        opened(path)
    assert problem in str(raised.value)


def test_data_that_cannot_be_split(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row(1), row(1)])
    with pytest.raises(DataError, match="a single prompt cannot be split"):
        opened(path)
    with pytest.raises(DataError, match="no training pair is left"):
        opened(path, validation_path=path)


def test_pairs_from_python() -> None:
    rows = given_rows({"train": [row(1)], "validation": [row(2)]})
    environment = PreferencesEnvironment(PreferencesConfig().with_given(rows, "x"), seed=0)
    assert parts(environment.samples("train")[0]) == (["1?"], "yes", "no")
    assert parts(environment.samples("validation")[0]) == (["2?"], "yes", "no")


def test_equal_answers_and_scores_in_the_wrong_order_are_counted(tmp_path: Path, caplog: Any) -> None:
    """Equal scores are no wrong order: published data have many."""
    scored = {"score_chosen": 2, "score_rejected": 1}
    rows = [row(number) | scored for number in range(6)]
    rows[2]["rejected"] = rows[4]["rejected"] = "yes"
    rows[3] |= {"score_chosen": 1, "score_rejected": 5}
    rows[5] |= {"score_rejected": 2}
    environment = opened(write(tmp_path / "a.jsonl", rows))
    assert len(environment.samples("train")) + len(environment.samples("validation")) == 6
    equal, worse = [record.getMessage() for record in caplog.records]
    path = tmp_path / "a.jsonl"
    assert equal == (
        "2 of 6 pairs have the same text as chosen and as rejected answer, which teach nothing; the first: "
        f"{path}, line 3. Remove them"
    )
    assert worse == (
        "1 of 6 pairs have a chosen answer with a lower score than the rejected one; the first: "
        f"{path}, line 4. Exchange the answers of these pairs, or remove them"
    )


def test_pairs_that_are_all_equal_or_all_in_the_wrong_order(tmp_path: Path, caplog: Any) -> None:
    reversed_rows = [row(number) | {"margin": -1.0} for number in range(3)]
    opened(write(tmp_path / "a.jsonl", reversed_rows))
    [warned] = [record.getMessage() for record in caplog.records]
    assert warned.startswith("3 of 3 pairs have a chosen answer with a lower score than the rejected one; the first: ")
    assert warned.endswith("Is a low score a good one? Otherwise exchange the columns (environment.columns)")
    equal = [row(number) | {"rejected": "yes"} for number in range(3)]
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: 3 of 3 pairs have the same text .* nothing to learn"):
        opened(write(tmp_path / "a.jsonl", equal))


def test_sound_pairs_say_nothing(tmp_path: Path, caplog: Any) -> None:
    opened(write(tmp_path / "a.jsonl", [row(number) | {"margin": float(number)} for number in range(3)]))
    assert not caplog.records


def test_a_fraction_of_0_holds_out_nothing(tmp_path: Path) -> None:
    environment = opened(write(tmp_path / "one.jsonl", [row(1)]), validation_fraction=0.0)
    assert (len(environment.samples("train")), len(environment.samples("validation"))) == (1, 0)

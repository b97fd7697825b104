"""GSM8K on real rows: reading, splitting, refusing bad data, and judging answers."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlframework.base.errors import DataError
from rlframework.config.environments import Gsm8kConfig
from rlframework.environments.gsm8k import Gsm8kEnvironment
from rlframework.environments.math_answers import same_answer

FIXTURES = Path(__file__).parents[1] / "fixtures"
TRAIN, TEST = FIXTURES / "gsm8k_train.jsonl", FIXTURES / "gsm8k_test.jsonl"


def make(seed: int = 0, **config: Any) -> Gsm8kEnvironment:
    return Gsm8kEnvironment(Gsm8kConfig(**config), seed=seed)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def row(question: str, answer: str = "#### 1") -> dict[str, str]:
    return {"question": question, "answer": answer}


def test_real_rows_are_judged() -> None:
    environment = make(train_path=TRAIN, validation_path=TEST, instruction=" Go.", system_prompt="Be brief.")
    train, validation = environment.samples("train"), environment.samples("validation")
    assert (len(train), len(validation)) == (20, 20)
    assert [s.answer for s in train[:3]] == ["72", "10", "5"]
    assert [s.answer for s in validation[:3]] == ["18", "3", "70000"]
    assert train[0].messages[0] == {"role": "system", "content": "Be brief."}
    assert train[0].messages[1]["content"].endswith("in April and May? Go.")
    assert train[0].completion == (
        "Natalia sold 48/2 = 24 clips in May.\nNatalia sold 48+24 = 72 clips altogether in April and May.\n#### 72"
    )
    for sample in [*train, *validation]:
        wrong = sample.completion.replace(f"#### {sample.answer}", f"#### {sample.answer}1")
        assert [environment.score(sample, text) for text in (sample.completion, wrong)] == [1.0, 0.0]
    kept = make(train_path=TRAIN, validation_path=TEST, calculator_annotations=True).samples("train")[0]
    assert "<<48/2=24>>" in kept.completion
    few = make(train_path=TRAIN, validation_path=TEST, max_samples=7, max_validation_samples=3)
    assert (len(few.samples("train")), len(few.samples("validation"))) == (7, 3)


@pytest.mark.parametrize(
    ("gold", "text", "same"),
    [
        ("18", "The answer is 18.", True),
        ("18", "She makes $18 every day!", True),
        ("18", "It is \\$18.00", True),
        ("18", "so \\boxed{18}", True),
        ("18", "$\\frac{36}{2}$", True),
        ("18", "so $x^2 = 324$ and \\boxed{18}!", True),
        ("1800", "#### 1,800", True),
        ("1800", "That makes 1,800 dollars", True),
        ("0.5", "1/2", True),
        ("-4", "#### -4", True),
        ("18", "#### 18 or 19", False),
        ("18", "18 of them, so 20", False),
        ("18", "81", False),
        ("18", "", False),
        ("18", "no idea", False),
        ("18", "####", False),
        ("18", "#### 18\n#### 19", False),
    ],
)
def test_answers_in_many_forms(gold: str, text: str, same: bool) -> None:
    assert same_answer(gold, text) is same


@pytest.mark.parametrize(
    "text",
    [
        "9^9^9^9",
        "$9^{9^{9^9}}$",
        "\\boxed{100000000!}",
        "\\boxed{9^{999999999}}",
        "(((9^9)^9)^9)^9",
        "\\boxed{\\binom{100000000}{50000000}}",
        "\\boxed{\\sum_{i=1}^{1000000000} i^{99}}",
        "$C(100000000, 50000000)$ \\boxed{\\dbinom{99999999}{44444444}}",
        "9**9**9**9 = \\boxed{9**9**9**9}",
        "factorial(100000000)",
        "__import__('time').sleep(100)",
        "9" * 100_000,
        "(" * 5000 + "1",
        "\\frac{" * 300 + "1",
        "\x00\ud7ff####\\boxed{" + "{" * 200,
    ],
)
def test_no_answer_keeps_the_checker_busy(text: str) -> None:
    """In a thread, where no signal could interrupt it."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(same_answer("18", text) or not same_answer("18", "18")))
    thread.start()
    thread.join(120)
    assert found == [False]


def test_format_reward() -> None:
    environment = make(train_path=TRAIN, validation_path=TEST, format_reward=0.25)
    sample = environment.samples("train")[0]
    texts = ["so\n#### 72", "so\n#### 71", "it is 72", "#### 72\nYes!"]
    turns = [[*sample.messages, {"role": "assistant", "content": text}] for text in texts]
    outcomes = environment.step([sample] * 4, turns)  # type: ignore[arg-type]
    assert [o.reward for o in outcomes] == [1.25, 0.25, 1.0, 1.0]
    assert [o.metrics["accuracy"] for o in outcomes] == [1.0, 0.0, 1.0, 1.0]
    assert [o.metrics["format"] for o in outcomes] == [0.25, 0.25, 0.0, 0.0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q", "answer": ', "line 3: not JSON"),
        ('{"question": "q"}', r"line 3: the field 'answer' is missing; the fields are \['question'\]"),
        ('{"question": "q", "answer": 3}', "line 3: the field 'answer' must be str, not int"),
        ('{"question": "q", "answer": "#### 3\\nand so on"}', "line 3: the last line of 'answer' must be '#### '"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps(row("q"))
    path.write_text(f"{good}\n\n{line}\n{good}\n", encoding="utf-8")
    with pytest.raises(DataError, match=f"rows.jsonl, {message}"):
        make(train_path=path)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "set either train_path"),
        ({"train_path": TRAIN, "dataset": "openai/gsm8k"}, "set either train_path"),
        ({"dataset": "openai/gsm8k", "validation_path": TEST}, "with dataset, set validation_split"),
    ],
)
def test_sections_that_name_no_data_or_too_much(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Gsm8kConfig(**config)


def test_validation_questions_leave_train(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [row("One?"), row("two?"), row("Three?")])
    test = write(tmp_path / "test.jsonl", [row("TWO? ")])
    questions = [s.metadata["question"] for s in make(train_path=train, validation_path=test).samples("train")]
    assert questions == ["One?", "Three?"]
    with pytest.raises(DataError, match="no training sample is left"):
        make(train_path=test, validation_path=train)


@pytest.mark.slow
def test_a_datasets_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The `datasets` library reads a local directory by name as it reads the hub's."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(TRAIN.read_bytes())
    (folder / "test.jsonl").write_bytes(TEST.read_bytes())
    environment = make(dataset=str(folder), subset=None)
    assert [s.answer for s in environment.samples("train")[:2]] == ["72", "10"]
    assert [s.answer for s in environment.samples("validation")[:2]] == ["18", "3"]
    with pytest.raises(DataError, match="there is no split 'nosuch'"):
        make(dataset=str(folder), subset=None, validation_split="nosuch")
    with pytest.raises(DataError, match="nothing: cannot be read"):
        make(dataset=str(tmp_path / "nothing"), subset=None)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "train.jsonl").write_text("{]", encoding="utf-8")
    with pytest.raises(DataError, match=r"broken/train\.jsonl, line 1: not JSON"):
        make(dataset=str(broken), subset=None)

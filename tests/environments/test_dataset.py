"""Anybody's data: samples, splits, judging, and what is said of data that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlframework.base.errors import DataError
from rlframework.config.environments import DatasetConfig, Gsm8kConfig
from rlframework.datasets.loader import PromptLoader
from rlframework.datasets.sources.memory import given_rows
from rlframework.environments import dataset
from rlframework.environments.dataset import DatasetEnvironment
from rlframework.environments.gsm8k import Gsm8kEnvironment
from rlframework.environments.math_answers import is_comparable

FIXTURES = Path(__file__).parents[1] / "fixtures"
TRAIN, TEST = FIXTURES / "gsm8k_train.jsonl", FIXTURES / "gsm8k_test.jsonl"


def make(path: Path, seed: int = 0, **config: Any) -> DatasetEnvironment:
    return DatasetEnvironment(DatasetConfig(path=str(path), **config), seed=seed)


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sums(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"question": f"{n}+1?", "answer": n + 1} for n in range(start, start + count)]


def answers(environment: DatasetEnvironment, split: Any) -> list[str]:
    return [sample.answer for sample in environment.samples(split)]


def test_real_questions_judged_by_math() -> None:
    environment = make(TRAIN, validation_path=str(TEST), check="math", instruction=" Go.", system_prompt="Be brief.")
    train, validation = environment.samples("train"), environment.samples("validation")
    assert (len(train), len(validation)) == (20, 20)
    assert answers(environment, "train")[:3] == ["72", "10", "5"]
    assert answers(environment, "validation")[:3] == ["18", "3", "70000"]
    assert train[0].messages[0] == {"role": "system", "content": "Be brief."}
    assert train[0].messages[1]["content"].endswith("in April and May? Go.")
    assert train[0].completion.endswith("in April and May.\n#### 72")
    assert environment.scores
    talk = [*train[0].messages, {"role": "assistant", "content": "So it is \\boxed{72.0}"}]
    [right] = environment.step([train[0]], [talk])  # type: ignore[list-item]
    [wrong] = environment.step([train[1]], [talk])  # type: ignore[list-item]
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.metrics["accuracy"] == 1.0


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_samples_of_conversations(tmp_path: Path, suffix: str) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    more = [{"role": "system", "content": "own"}, *talk, {"role": "user", "content": "more"}]
    path = write(tmp_path / f"a.{suffix}", {"messages": talk}, {"messages": more})
    environment = make(
        path, validation_path=str(write(tmp_path / "v.jsonl", *sums(1))), system_prompt="be", instruction="!"
    )
    first, second = environment.samples("train")
    assert first.messages == ({"role": "system", "content": "be"}, {"role": "user", "content": "hi!"})
    assert first.completion == "hello"
    assert [turn["content"] for turn in second.messages] == ["own", "hi", "hello", "more!"]
    assert second.completion == ""
    assert first.id == ("a-1" if suffix == "jsonl" else "a-0")


def test_without_a_check_there_are_samples_and_no_judge(tmp_path: Path) -> None:
    environment = make(write(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"}))
    assert not environment.scores
    sample = environment.samples("train")[0]
    assert (sample.messages, sample.answer) == ((), "")
    with pytest.raises(DataError, match=r"environment\.check is none, so answers cannot be scored"):
        environment.step([sample], [[{"role": "assistant", "content": "x"}]])


@pytest.mark.parametrize(
    ("row", "config", "message"),
    [
        ({"question": "q"}, {"check": "exact"}, r"the column 'answer' has no value to check .*environment\.check=none"),
        ({"question": "q", "answer": None}, {"check": "math"}, "the column 'answer' has no value"),
        ({"text": "t", "answer": "1"}, {"check": "exact"}, "a text without a prompt cannot be scored"),
        (
            {"question": "q", "answer": "Paris"},
            {"check": "math"},
            "check=math cannot compare the answer 'Paris' .*exact",
        ),
        ({"question": "q", "answer": "####"}, {"check": "math"}, "cannot compare the answer ''"),
        ({"question": "q", "answer": ""}, {"check": "math"}, "the last assistant turn is empty"),
        ({"a": "b"}, {}, r"no conversation in the columns \['a'\]"),
        ({"question": "q", "answer": "1"}, {"columns": {"answer": "gold"}}, "no column 'gold'; the columns are"),
    ],
)
def test_a_row_that_does_not_fit_is_named_at_the_start(tmp_path: Path, row, config, message) -> None:
    good = {"question": "1+1?", "answer": "2", "gold": "2"}
    path = write(tmp_path / "a.jsonl", good, row, good)
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: .*{message}"):
        make(path, **config)


def gsm8k(path: Path, seed: int, **config: Any) -> Gsm8kEnvironment:
    return Gsm8kEnvironment(Gsm8kConfig(train_path=path, **config), seed=seed)


@pytest.mark.parametrize("environment_of", [make, gsm8k])
def test_a_share_is_held_out_with_all_copies(tmp_path: Path, environment_of: Any) -> None:
    """Forty rows of twenty questions, the copies in other spelling; a fifth is four questions."""
    rows = [{"question": f"How much is {n}?", "answer": f"#### {n}"} for n in range(20)]
    rows += [{"question": f" how  MUCH is {n}?", "answer": f"#### {n}"} for n in range(20)]
    path = write(tmp_path / "a.jsonl", *rows)
    environment = environment_of(path, 3, validation_fraction=0.2)
    train, validation = answers(environment, "train"), answers(environment, "validation")
    assert (len(train), len(validation), len(set(validation))) == (32, 8, 4)
    assert not set(train) & set(validation)
    assert train == sorted(train[:16], key=lambda text: int(text.split()[-1])) * 2  # in the order of the data
    assert answers(environment_of(path, 3, validation_fraction=0.2), "validation") == validation
    assert answers(environment_of(path, 4, validation_fraction=0.2), "validation") != validation
    nothing = environment_of(path, 3, validation_fraction=0.0)
    assert (len(answers(nothing, "train")), answers(nothing, "validation")) == (40, [])


def test_prompts_of_validation_leave_train(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = write(tmp_path / "a.jsonl", *sums(4))
    test = write(tmp_path / "b.parquet", {"question": " 2+1? ", "answer": 3})
    environment = make(train, validation_path=str(test), check="exact")
    [sample] = environment.samples("validation")
    assert [environment.score(sample, text) for text in (" 3\n", "3.0", "")] == [1.0, 0.0, 0.0]
    assert caplog.messages == []  # an evaluation trains on nothing
    for _ in range(2):
        assert answers(environment, "train") == ["1", "2", "4"]
    left_out = f"1 of 4 rows of {train} are left out of training, because their prompts are also in validation"
    assert caplog.messages == [left_out]
    asked = [{"role": "system", "content": "be"}, {"role": "user", "content": "2+1?"}]
    told = write(tmp_path / "c.jsonl", {"messages": asked, "answer": 3})  # the system's words do not count
    assert answers(make(train, validation_path=str(told), check="exact"), "train") == ["1", "2", "4"]
    with pytest.raises(DataError, match="no training row is left, because every prompt is also in validation"):
        make(test, validation_path=str(train))


@pytest.mark.slow
def test_splits_and_limits(tmp_path: Path) -> None:
    write(tmp_path / "own" / "train.jsonl", *sums(9))
    write(tmp_path / "own" / "dev.jsonl", *sums(5, start=100))
    folder = tmp_path / "own"
    environment = make(folder, validation_split="validation", max_samples=4, max_validation_samples=2, check="exact")
    assert answers(environment, "train") == ["1", "2", "3", "4"]
    assert answers(environment, "validation") == ["101", "102"]
    with pytest.raises(DataError, match=r"no split 'test'; the splits are \['train', 'validation'\]"):
        make(folder, validation_split="test")
    # what is beyond the limit is not used at all, but of a share that is held out the rest is trained on
    held_out = make(folder, validation_fraction=0.5, max_validation_samples=2, check="exact")
    assert (len(held_out.samples("train")), len(held_out.samples("validation"))) == (7, 2)


def test_one_prompt_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a single prompt cannot be split; give environment.validation_path"):
        make(write(tmp_path / "a.jsonl", {"text": "same"}, {"text": "Same "}))


def test_samples_are_a_sequence(tmp_path: Path) -> None:
    samples = make(write(tmp_path / "a.jsonl", *sums(9)), validation_path=str(TEST)).samples("train")
    assert len(samples) == 9
    assert samples[-1] == samples[8] == list(samples)[8]
    part = samples[2:5]
    assert [sample.id for sample in part] == ["a-3", "a-4", "a-5"]
    assert len(part[1:]) == 2
    assert samples[:0] is not None
    assert len(samples[:0]) == 0
    with pytest.raises(IndexError):
        samples[9]


def test_of_many_rows_some_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine rows where four are many: two are tried, the first and the last, and validation is held out by rows."""
    monkeypatch.setattr(dataset, "SCANNED", 4)
    monkeypatch.setattr(dataset, "PROBED", 2)
    path = write(tmp_path / "a.jsonl", *sums(4), {"a": "b"}, *sums(4))
    environment = make(path, check="exact", validation_fraction=0.3)
    assert (len(environment.samples("train")), len(environment.samples("validation"))) == (6, 3)
    with pytest.raises(DataError, match="line 5: no conversation"):
        [*environment.samples("train"), *environment.samples("validation")]
    beside = make(path, check="exact", validation_path=str(write(tmp_path / "b.jsonl", *sums(1))))
    assert len(beside.samples("train")) == 9
    with pytest.raises(DataError, match="line 9: no conversation"):
        make(write(tmp_path / "c.jsonl", *sums(8), {"a": "b"}))


@pytest.mark.parametrize("gold", ["18", "-1,800.50", "\\frac{1}{2}", "$18", "\\boxed{4}", "5\\text{ cm}", "2+3"])
def test_math_can_compare_numbers(gold: str) -> None:
    assert is_comparable(gold)


@pytest.mark.parametrize("gold", ["\\frac{\\sqrt{3}}{2}", "x^2", "Paris", "3:20 pm", "", "("])
def test_math_cannot_compare_other_answers(gold: str) -> None:
    assert not is_comparable(gold)


def mixture(folder: Path, **config: Any) -> DatasetEnvironment:
    sources = {
        "small": {"path": str(write(folder / "small.jsonl", *sums(10))), "weight": 3},
        "large": {"path": str(write(folder / "large.jsonl", *sums(30, start=100)))},
    }
    return DatasetEnvironment(DatasetConfig(mixture=sources, **config), seed=0)


def test_a_mixture_has_the_rows_of_its_sources_by_name(tmp_path: Path) -> None:
    environment = mixture(tmp_path, validation_fraction=0.1)
    train, validation = environment.samples("train"), environment.samples("validation")
    assert len(validation) == 4
    assert [source.name for source in train.mixture] == ["large", "small"]
    assert [source.weight for source in train.mixture] == [1.0, 3.0]
    large, small = (source.rows for source in train.mixture)
    assert large + small == len(train) == 36
    assert {sample.id.partition("-")[0] for sample in train[:large]} == {"large/large"}
    assert {sample.id.partition("-")[0] for sample in train[large:]} == {"small/small"}
    assert train[:5].mixture == ()
    loader = PromptLoader(train, 8, 0)
    next(loader)
    metrics = loader.pop_metrics()
    assert (metrics["train/rows/small"], metrics["train/rows/large"]) == (6.0, 2.0)


def test_limits_and_validation_data_of_a_mixture(tmp_path: Path) -> None:
    held_out = write(tmp_path / "v.jsonl", *sums(9))
    environment = mixture(tmp_path, validation_path=str(held_out), max_samples=4)
    assert [source.rows for source in environment.samples("train").mixture] == [4, 1]
    everything = write(tmp_path / "v.jsonl", *sums(10))
    with pytest.raises(DataError, match=r"environment\.mixture\.small: no training row is left"):
        mixture(tmp_path, validation_path=str(everything))
    write(tmp_path / "small.jsonl", {"a": 1})
    with pytest.raises(DataError, match=r"small\.jsonl, line 1: no conversation in the columns"):
        DatasetEnvironment(DatasetConfig(mixture={"x": {"path": str(tmp_path / "small.jsonl")}}), seed=0)


def test_rows_from_python_are_split_like_those_of_a_file(tmp_path: Path) -> None:
    from_file = make(write(tmp_path / "train.jsonl", *sums(40)))
    rows = given_rows(sums(40))
    given = DatasetEnvironment(DatasetConfig().with_given(rows, "x"), seed=0)
    for split in ("train", "validation"):
        assert answers(given, split) == answers(from_file, split)
    assert given.samples("train")[0].id.startswith("train-")
    found = [sample.metadata for split in ("train", "validation") for sample in given.samples(split)]
    assert sorted(found, key=lambda row: row["answer"]) == sums(40)
    both = given_rows({"train": sums(6), "validation": sums(3)})
    given = DatasetEnvironment(DatasetConfig().with_given(both, "x"), seed=0)
    assert answers(given, "train") == [str(row["answer"]) for row in sums(6)[3:]]
    assert answers(given, "validation") == [str(row["answer"]) for row in sums(3)]
    with pytest.raises(
        DataError, match=r"train rows from Python, row 1 \(counted from 0\): no conversation in the columns"
    ):
        DatasetEnvironment(DatasetConfig().with_given(given_rows([*sums(1), {"a": 1}]), "x"), seed=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"path": "a", "mixture": {"b": {"path": "b"}}}, "path and mixture each say where the training rows come from"),
        ({"path": "a", "data_digest": "x"}, "path and data_digest each say"),
        ({"mixture": {}}, "mixture has no sources"),
        ({"mixture": {"b": {"path": "b", "weight": 0}}}, "greater than 0"),
        ({"mixture": {"b/c": {"path": "b"}}}, "should match pattern"),
        ({"split": "train"}, r"split is for environment\.path, which is not set"),
        ({"validation_split": "test"}, "remove it, or set validation_path"),
    ],
)
def test_sections_that_name_no_data_or_too_much(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DatasetConfig(**config)

"""Writing and reading back `metrics.jsonl` and `samples.jsonl`."""

import json
import math
from types import SimpleNamespace

import pytest

from rlframework.base.errors import DataError
from rlframework.config.sections import ObserversConfig
from rlframework.observers.jsonl import JsonlObserver, drop_steps_after, read_history
from rlframework.plugins.hookspec import RunInfo, SampleRecord


@pytest.fixture
def written(tmp_path):
    """`written(step, metrics, samples, keep=4)`: lets an observer of the run at `tmp_path` write a step."""

    def write(step, metrics, samples=(), keep=4):
        observer = JsonlObserver()
        config = SimpleNamespace(observers=ObserversConfig(samples=keep))
        observer.rlframework_run_started(RunInfo(config, tmp_path / "new"))
        observer.rlframework_step_finished(step, metrics, samples, ())
        lines = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()  # before it is closed
        observer.close()
        return lines

    return write


def strict(line):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_a_line_is_on_disk_after_each_step_and_unfinished_ones_go(written, tmp_path):
    assert strict(written(1, {"train/loss": 0.5})[-1])["train/loss"] == 0.5
    with (tmp_path / "new" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "x"')
    assert [strict(line)["step"] for line in written(2, {"train/loss": 0.25})] == [1, 2]


def test_non_finite_numbers_survive_a_round_trip_as_valid_json(written, tmp_path):
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}
    [line] = written(1, values, [SampleRecord("p", "c", math.nan, 1)])
    assert [strict(line)[name] for name in "abcd"] == ["NaN", "Infinity", "-Infinity", 1.0]
    assert strict((tmp_path / "new" / "samples.jsonl").read_text())["reward"] == "NaN"
    [row] = read_history(tmp_path / "new" / "metrics.jsonl")
    assert math.isnan(row["a"])
    assert (row["b"], row["c"], row["d"]) == (math.inf, -math.inf, 1.0)


def test_each_sample_is_one_object_with_unchanged_text(written, tmp_path):
    text = 'one\ntwo "ü" \u2028'
    written(2, {}, [SampleRecord("p", "c", 0.0, 2)], keep=0)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["metrics.jsonl", "timeline.jsonl"]
    written(3, {}, [SampleRecord("1+1=", text, 1.0, 3, "validation")])
    file = (tmp_path / "new" / "samples.jsonl").read_text(encoding="utf-8")
    assert file.count("\n") == 1
    expected = {"prompt": "1+1=", "completion": text, "reward": 1.0, "step": 3, "kind": "validation"}
    assert strict(file) == {"run": "new", **expected}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (  # resumed from step 2
            [(1, "x", 1), (2, "x", 2), (3, "x", 3), (4, "x", 4), (3, "x", 30), (4, "x", 40)],
            [{"step": 1, "x": 1}, {"step": 2, "x": 2}, {"step": 3, "x": 30}, {"step": 4, "x": 40}],
        ),
        ([(1, "a", 1), (1, "b", 2)], [{"step": 1, "a": 1, "b": 2}]),  # training and validation of one step
    ],
)
def test_a_history_has_one_row_per_step_and_no_incomplete_line(tmp_path, rows, expected):
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        "".join(f'{{"step": {step}, "{name}": {value}}}\n' for step, name, value in rows) + '{"step": 9, "x'
    )
    assert read_history(file) == expected


@pytest.mark.parametrize("bad", ["not json", '["step"]', '{"x": 1.0}', '{"step": 1, "x": "word"}', '{"step": null}'])
def test_history_names_an_invalid_line(tmp_path, bad):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 0}}\n{bad}\n{{"step": 2}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        read_history(file)


def test_a_history_that_cannot_be_read_is_a_data_error(tmp_path):
    (tmp_path / "binary").write_bytes(b'{"step": 1}\n\xff\xfe\n')
    for name, reason in (("missing", "No such file"), ("binary", "it is not UTF-8 text")):
        with pytest.raises(DataError, match=rf"cannot read .*{name}: {reason}"):
            read_history(tmp_path / name)


@pytest.mark.parametrize(
    ("steps", "last", "kept"),
    [
        ([0, 1, 2, 3], 2, [0, 1, 2]),
        ([0, 1, 2, 3], 3, [0, 1, 2, 3]),
        ([0, 1, 2, 3], -1, []),
        ([1, 2, 3, 2, 3, 4], 3, [1, 2, 3, 2, 3]),  # it was resumed before, from step 1
        ([], 2, []),
    ],
)
def test_repeated_steps_are_truncated(tmp_path, steps, last, kept):
    for name in ("metrics.jsonl", "samples.jsonl", "timeline.jsonl"):
        (tmp_path / name).write_text("".join(f'{{"step": {step}, "text": "\\u00e4"}}\n' for step in steps) + '{"st')
    drop_steps_after(tmp_path, last)
    drop_steps_after(tmp_path / "no such run", last)
    for name in ("metrics.jsonl", "samples.jsonl", "timeline.jsonl"):
        assert [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()] == kept

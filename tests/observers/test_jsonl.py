"""Writing and reading back `metrics.jsonl` and `samples.jsonl`."""

import json
import math
from types import SimpleNamespace

import pytest

from rlframework.base.errors import DataError
from rlframework.config.sections import ObserversConfig
from rlframework.observers.jsonl import JsonlObserver, drop_steps_after, read_history
from rlframework.plugins.hookspec import RunInfo, SampleRecord


def started(path, samples=4):
    observer = JsonlObserver()
    observer.rlframework_run_started(RunInfo(SimpleNamespace(observers=ObserversConfig(samples=samples)), path))
    return observer


def strict(line):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_a_line_is_on_disk_after_each_step(tmp_path):
    observer = started(tmp_path / "new" / "run")
    for number, loss in enumerate((0.5, 0.25), start=1):
        observer.rlframework_step_finished(number, {"train/loss": loss}, [], ())
        lines = (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()
        last = strict(lines[-1])
        assert (len(lines), last["step"], last["train/loss"]) == (number, number, loss)
    observer.close()


def test_non_finite_numbers_survive_a_round_trip_as_valid_json(tmp_path):
    observer = started(tmp_path)
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}
    observer.rlframework_step_finished(1, values, [SampleRecord("p", "c", math.nan, 1)], ())
    observer.close()
    line = strict((tmp_path / "metrics.jsonl").read_text())
    assert [line[name] for name in "abcd"] == ["NaN", "Infinity", "-Infinity", 1.0]
    assert strict((tmp_path / "samples.jsonl").read_text())["reward"] == "NaN"
    [row] = read_history(tmp_path / "metrics.jsonl")
    assert math.isnan(row["a"])
    assert (row["b"], row["c"], row["d"]) == (math.inf, -math.inf, 1.0)


def test_each_sample_is_one_object_with_unchanged_text(tmp_path):
    observer = started(tmp_path)
    text = 'one\ntwo "ü" \u2028 \ud83d'.encode("utf-8", "ignore").decode()
    observer.rlframework_step_finished(3, {}, [SampleRecord("1+1=", text, 1.0, 3, "validation")], ())
    observer.close()
    file = (tmp_path / "samples.jsonl").read_text(encoding="utf-8")
    assert file.count("\n") == 1
    expected = {"prompt": "1+1=", "completion": text, "reward": 1.0, "step": 3, "kind": "validation"}
    assert strict(file) == {"run": tmp_path.name, **expected}


def test_no_samples_file_if_samples_are_disabled(tmp_path):
    observer = started(tmp_path, samples=0)
    observer.rlframework_step_finished(1, {}, [SampleRecord("p", "c", 0.0, 1)], ())
    observer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "timeline.jsonl"]


@pytest.mark.parametrize(("complete", "expected"), [('{"step": 1, "x": 1.0}\n', [(1, 1), (2, 5)]), ("", [(2, 5)])])
def test_appends_after_the_last_complete_line(tmp_path, complete, expected):
    file = tmp_path / "metrics.jsonl"
    file.write_text(complete + '{"step": 2, "x"')
    observer = started(tmp_path)
    observer.rlframework_step_finished(2, {"x": 5.0}, [], ())
    observer.close()
    assert [(row["step"], row["x"]) for row in read_history(file)] == expected


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

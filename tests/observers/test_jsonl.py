"""Writing and reading back `metrics.jsonl` and `samples.jsonl`, and the images of samples on the report page."""

import json
import math
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlframework.base.errors import DataError
from rlframework.config.sections import ObserversConfig
from rlframework.interfaces.messages import Picture
from rlframework.observers.jsonl import FOLDER, JsonlObserver, drop_steps_after, read_history
from rlframework.observers.runs import read_run
from rlframework.plugins.hookspec import RunInfo, SampleRecord
from rlframework.runner.output_folder import read_contents
from rlframework_report.report.content import content


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


Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def picture(size: tuple[int, int], color: tuple[int, int, int]) -> Picture:
    file = BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return Picture(file.getvalue(), "row 1")


def write(folder: Path, *samples: SampleRecord) -> list[dict[str, Any]]:
    observer = JsonlObserver()
    observer.rlframework_run_started(RunInfo(SimpleNamespace(observers=ObserversConfig()), folder))
    observer.rlframework_step_finished(1, {}, samples, [])
    observer.close()
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


RED, BLUE = (220, 0, 0), (0, 0, 220)


def record(*images: Picture, prompt: str = "color?") -> SampleRecord:
    return SampleRecord(prompt, "red", 1.0, 1, images=images)


def page_of(folder: Path) -> dict[str, Any]:
    return content([read_run(folder, "a")], 1)["runs"][0]["samples"]


def test_equal_images_are_stored_once_and_small(tmp_path: Path) -> None:
    big = picture((300, 100), RED)
    rows = write(tmp_path, record(big, picture((8, 8), BLUE)), record(picture((300, 100), RED)), record())
    first, second = rows[0]["images"]
    assert [row.get("images") for row in rows] == [[first, second], [first], None]
    assert {path.name for path in (tmp_path / FOLDER).iterdir()} == {first, second}
    with Image.open(tmp_path / FOLDER / first) as image, Image.open(tmp_path / FOLDER / second) as small:
        assert (image.size, small.size) == ((128, 43), (8, 8))
        red, green, blue = image.getpixel((64, 20))
    assert red > 200
    assert max(green, blue) < 20


def test_another_run_replaces_the_images_of_one_that_stopped(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    write(tmp_path, record(picture((8, 8), RED)))
    assert FOLDER in read_contents(tmp_path).results
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')  # a run that failed before its first step
    (tmp_path / "samples.jsonl").unlink()
    assert FOLDER in read_contents(tmp_path).startup


def test_the_page_shows_the_images_of_each_prompt(tmp_path: Path) -> None:
    red, blue = picture((8, 8), RED), picture((8, 8), BLUE)
    rows = write(tmp_path, record(red), record(red), record(blue, red), record())
    found = page_of(tmp_path)
    assert found["prompts"] == ["color?"] * 3
    assert [row[2] for row in found["rows"]] == [0, 0, 1, 2]
    assert [list(names) for names in found["prompt_images"]] == [rows[0]["images"], rows[2]["images"], []]
    assert found["images"].keys() == set(rows[2]["images"])
    assert all(uri.startswith("data:image/jpeg;base64,") for uri in found["images"].values())


def test_images_beyond_the_budget_are_omitted_from_the_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write(tmp_path, *(record(picture((8, 8), (shade, 0, 0))) for shade in (10, 90, 200)))
    longest = max(map(len, page_of(tmp_path)["images"].values()))
    monkeypatch.setitem(content.__globals__, "IMAGES", 2 * longest)
    assert page_of(tmp_path)["images"].keys() == {rows[1]["images"][0], rows[2]["images"][0]}


@pytest.mark.parametrize("stem", ["../secret", "/etc/hostname", "secret", f"{0:031}\0", f"{0:032}", f"{1:032}"])
def test_a_name_in_samples_reads_no_other_file(tmp_path: Path, stem: str) -> None:
    write(tmp_path, record(picture((8, 8), RED)))
    for name in ("secret.jpg", f"{FOLDER}/secret.jpg", f"{FOLDER}/{1:032}.jpg"):
        (tmp_path / name).write_text("secret")
    row = {"step": 1, "prompt": "p", "completion": "c", "images": [f"{stem}.jpg"]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(row) + "\n")
    assert page_of(tmp_path)["images"] == {}


def test_the_page_shows_the_images_of_each_turn(tmp_path: Path) -> None:
    seen = [{"type": "image", "image": picture((8, 8), RED)}, {"type": "text", "text": "color?"}]
    turns = (
        {"role": "user", "content": seen, "trained": False},
        {"role": "assistant", "content": "a", "trained": True},
    )
    [row] = write(tmp_path, SampleRecord("color?", "a", 1.0, 1, turns=turns))
    [name] = [part["image"] for part in row["turns"][0]["content"] if part["type"] == "image"]
    found = page_of(tmp_path)
    assert [turn.get("images") for turn in found["rows"][0][6]] == [[name], None]
    assert list(found["images"]) == [name]
    assert seen[0]["image"].digest == name.removesuffix(".jpg")  # what was logged is left as it was

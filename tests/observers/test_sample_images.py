"""Images of samples: stored once and small in the run's directory, and shown on the report page."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlframework.config.sections import ObserversConfig
from rlframework.interfaces.messages import Picture
from rlframework.observers.jsonl import FOLDER, JsonlObserver
from rlframework.observers.runs import read_run
from rlframework.plugins.hookspec import RunInfo, SampleRecord
from rlframework.runner.output_folder import read_contents
from rlframework_report.report.content import content

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

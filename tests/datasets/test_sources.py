"""Opening data sets of every kind: what their rows are, and what is said where there are none."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, disable_progress_bars, enable_progress_bars

from rlframework.base.errors import DataError
from rlframework.datasets.sources import opening as sources
from rlframework.datasets.sources.opening import open_rows
from rlframework.datasets.sources.rows import ArrowRows

TALK = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "yes"}]
ROWS: list[dict[str, Any]] = [{"n": n, "text": "x" * n, "messages": TALK * n, "none": None} for n in range(1, 8)]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """No progress bars; and a cache that must stay empty."""
    disable_progress_bars()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    yield
    enable_progress_bars()
    assert not (tmp_path / "cache").exists()


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def saved(path: Path, rows: list[dict[str, Any]]) -> Path:
    Dataset.from_list(rows).save_to_disk(path)
    return path


def refused(*arguments: Any, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        list(open_rows(*arguments, **options))
    return str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: jsonl(folder / "a.jsonl", ROWS),
        lambda folder: jsonl(folder / "a.json", ROWS),
        lambda folder: parquet(folder / "a.parquet", ROWS),
        lambda folder: parquet(folder / "a.parquet", ROWS, row_group_size=2, compression="zstd"),
        lambda folder: saved(folder / "saved", ROWS),
        lambda folder: jsonl(folder / "own" / "train.jsonl", ROWS).parent,
        lambda folder: parquet(folder / "own" / "data.parquet", ROWS).parent,
    ],
    ids=["jsonl", "json", "parquet", "row-groups", "saved", "folder-of-jsonl", "folder-of-parquet"],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_the_same_rows_from_every_kind_of_source(tmp_path: Path, make, kind) -> None:
    rows = open_rows(kind(make(tmp_path)))
    assert list(rows) == ROWS
    assert len(rows) == 7
    assert np.all(np.diff(rows.sizes()) > 0)  # each row is longer than the one before
    assert len({rows.label(number) for number in range(7)}) == 7


@pytest.mark.parametrize(("suffix", "mark"), [("csv", ","), ("tsv", "\t")])
def test_values_of_csv_are_text_as_written(tmp_path: Path, suffix: str, mark: str) -> None:
    (tmp_path / f"a.{suffix}").write_bytes(
        b'\xef\xbb\xbfquestion,answer\r\n"one, two\r\n""three""",007\r\n\xc3\xa9,\r\n'.replace(b",", mark.encode())
    )
    (tmp_path / f"b.{suffix}").write_text(mark.join(("answer", "level")) + "\n" + mark.join(("1.50", "NA")) + "\n")
    rows = open_rows(str(tmp_path / f"*.{suffix}"))
    assert list(rows) == [
        {"question": f'one{mark} two\r\n"three"', "answer": "007", "level": None},
        {"question": "é", "answer": "", "level": None},
        {"question": None, "answer": "1.50", "level": "NA"},
    ]
    assert [rows.where(number).rpartition("/")[2] for number in range(3)] == [
        f"a.{suffix}, line 2",  # to line 3
        f"a.{suffix}, line 4",
        f"b.{suffix}, line 2",
    ]
    assert rows.label(1) == "a-4"


def test_lines_of_csv_are_an_editors(tmp_path: Path) -> None:
    """Blank lines count. A value that is too long for Python's reader leaves the number of the row."""
    (tmp_path / "a.csv").write_text("a,b\n1,2\n\n3,4\n")
    assert open_rows(tmp_path / "a.csv").where(1) == f"{tmp_path}/a.csv, line 4"
    (tmp_path / "a.csv").write_text(f"a,b\n1,2\n\n3,{'4' * 200_000}\n")
    rows = open_rows(tmp_path / "a.csv")
    assert rows.where(1) == f"{tmp_path}/a.csv, row 2 (counted from 1, without the header)"
    assert rows.label(1) == "a-1"


def test_sizes_of_arrow_rows_count_the_bytes_of_texts(tmp_path: Path) -> None:
    """`é` has two bytes; a turn has `user` and `assistant` too: 4 + 2 + 9 + 3 = 18 a pair."""
    rows = open_rows(parquet(tmp_path / "a.parquet", ROWS, row_group_size=3))
    assert rows.sizes().tolist() == [n + 18 * n for n in range(1, 8)]
    holes = pa.table({"a": ["xx", None, "é"], "b": [["x", None], None, ["yy", "z"]], "c": [1, 2, 3]})
    table = pa.concat_tables([holes, holes.slice(1)])
    assert ArrowRows(table, [("t", 5)], "t").sizes().tolist() == [3, 0, 5, 0, 5]


def test_files_by_pattern_and_where_their_rows_stand(tmp_path: Path) -> None:
    parquet(tmp_path / "a-0.parquet", ROWS[:3])
    parquet(tmp_path / "a-1.parquet", ROWS[3:])
    jsonl(tmp_path / "a.jsonl", ROWS)
    rows = open_rows(str(tmp_path / "*.parquet"))
    assert list(rows) == ROWS
    assert rows.where(2) == f"{tmp_path}/a-0.parquet, row 2 (counted from 0)"
    assert rows.where(3) == f"{tmp_path}/a-1.parquet, row 0 (counted from 0)"
    assert open_rows(str(tmp_path / "*.jsonl")).where(3) == f"{tmp_path}/a.jsonl, line 4"
    assert "has files of several kinds (jsonl, parquet)" in refused(str(tmp_path / "a*"))
    assert "no file matches this pattern" in refused(str(tmp_path / "b*.parquet"))


def test_files_whose_columns_differ(tmp_path: Path) -> None:
    """Columns missing in one file are null; integers and floats become floats; text and numbers are rejected."""
    parquet(tmp_path / "a.parquet", [{"x": 1, "y": "t"}])
    parquet(tmp_path / "b.parquet", [{"x": 1.5}])
    assert list(open_rows(str(tmp_path / "*.parquet"))) == [{"x": 1.0, "y": "t"}, {"x": 1.5, "y": None}]
    parquet(tmp_path / "c.parquet", [{"x": "one"}])
    message = refused(str(tmp_path / "*.parquet"))
    assert "c.parquet: " in message
    assert "do not fit those of" in message


@pytest.mark.parametrize("make", [jsonl, parquet], ids=["jsonl", "parquet"])
def test_splits_and_subsets_of_a_folder(tmp_path: Path, make) -> None:
    own, suffix = tmp_path / "own", make.__name__
    make(own / f"train-00000.{suffix}", ROWS[:2])
    make(own / f"train-00001.{suffix}", ROWS[2:4])
    make(own / f"test.{suffix}", ROWS[4:])
    assert list(open_rows(own)) == ROWS[:4]
    assert list(open_rows(own, split="test")) == ROWS[4:]
    assert refused(own, split="dev").endswith("there is no split 'dev'; the splits are ['test', 'train']")
    assert "Available: ['default']" in refused(own, subset="hard")
    entries = "".join(f"- config_name: {n}\n  data_files: {n}.{suffix}\n" for n in ("train-00000", "test"))
    (own / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    assert list(open_rows(own, subset="test")) == ROWS[4:]
    assert "['train-00000', 'test']" in refused(own)


@pytest.mark.slow
def test_what_save_to_disk_wrote(tmp_path: Path) -> None:
    both = DatasetDict({"train": Dataset.from_list(ROWS[:3]), "test": Dataset.from_list(ROWS[3:])})
    both.save_to_disk(tmp_path / "both")
    assert list(open_rows(tmp_path / "both")) == ROWS[:3]
    rows = open_rows(tmp_path / "both", split="test")
    assert list(rows) == ROWS[3:]
    assert rows.where(1) == f"{tmp_path}/both, split test, row 1 (counted from 0)"
    assert "there is no split 'dev'; the splits are ['test', 'train']" in refused(tmp_path / "both", split="dev")
    alone = saved(tmp_path / "alone", ROWS)
    assert "without splits; remove split" in refused(alone, split="train")
    assert "has no subsets" in refused(alone, subset="x")
    Dataset.from_list(ROWS).select([4, 1]).save_to_disk(tmp_path / "some")
    assert list(open_rows(tmp_path / "some")) == [ROWS[4], ROWS[1]]


def test_a_name_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library loads one split, by name; the error for an unknown one lists those there are."""
    for split in ("train", None):
        message = refused("openai/gsm8k", subset="main", split=split)  # without a network
        assert message.startswith("the data set 'openai/gsm8k' (subset 'main', split")
        assert "There is no local file or directory of that name. Check the name and the network" in message
    asked = []

    def load(name: str, subset: str | None, *, split: str) -> Dataset:
        asked.append((name, subset, split))
        return Dataset.from_list(ROWS).select([2, 0])

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("datasets.get_dataset_split_names", lambda name, subset: ["train", "test"])
    rows = open_rows("someone/data", subset="easy")
    assert list(rows) == [ROWS[2], ROWS[0]]
    assert rows.where(1) == "data set someone/data, split train, row 1 (counted from 0)"
    assert asked == [("someone/data", "easy", "train")]
    monkeypatch.setattr("datasets.get_dataset_split_names", lambda name, subset: ["dev", "test"])
    assert "there is no split 'train'; the splits are ['dev', 'test']" in refused("someone/data")


@pytest.mark.parametrize("name", ["/no/such", "./nothing", "a/b/c", "gone.jsonl", "gone.parquet", "gone*"])
def test_the_hub_is_not_asked_for_what_looks_like_a_path(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sources, "_from_hub", lambda *arguments: pytest.fail("asked the hub"))
    message = refused(name)
    assert message.startswith((name, name.removeprefix("./")))
    assert "No such file" in message or "no file matches" in message


def test_a_missing_file_has_its_key_and_the_nearest_name(tmp_path: Path) -> None:
    jsonl(tmp_path / "questions.jsonl", ROWS)
    with pytest.raises(DataError) as raised:
        open_rows(tmp_path / "quesitons.jsonl", key="environment.path")
    message = str(raised.value)
    assert message.startswith(f"environment.path: {tmp_path / 'quesitons.jsonl'}: cannot be read (No such file")
    assert "give a JSONL, Parquet or CSV file" in message
    assert message.endswith(" Did you mean 'questions.jsonl'?")


def test_a_path_is_never_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "No such file or directory" in refused(Path("openai/gsm8k"))
    jsonl(tmp_path / "plain.jsonl", ROWS)
    assert len(open_rows("plain.jsonl")) == 7  # without a slash
    jsonl(tmp_path / "glue" / "train.jsonl", ROWS[:1])
    assert len(open_rows("glue")) == 1  # a directory here comes before a name there


LINE = b'{"a": 1}\n'


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.csv", b"", {}, "a.csv: .*Empty CSV file"),
        ("a.csv", b"a,b\n", {}, "a.csv: the file has no rows"),
        ("a.csv", b"a,b\n1\n", {}, "a.csv: .*Expected 2 columns, got 1"),
        ("a.csv", b"a,a\n1,2\n", {}, r"a.csv: two columns have one name: \['a', 'a'\]"),
        ("a.csv", b"a\n\xff\n", {}, "a.csv: .*can't decode byte 0xff"),
        ("a.jsonl", b"", {}, "a.jsonl: the file is empty"),
        ("a.parquet", b"", {}, "a.parquet: is missing, damaged, or not a Parquet file"),
        ("a.parquet", b"PAR1 and nothing more", {}, "a.parquet: is missing, damaged, or not a Parquet file"),
        ("a.xlsx", b"a,b\n", {}, r"files of type '.xlsx' are not supported, only \['.csv', '.json'"),
        ("a.jsonl", LINE, {"split": "train"}, "a file has no split; remove split"),
        ("a.jsonl", LINE, {"subset": "x"}, "a file has no subset; remove subset"),
        ("folder/train.txt", b"a,b\n1,2\n", {}, "files of type '.txt' are not supported"),
        ("folder/.hidden", b"", {}, "no data files found"),
    ],
)
def test_data_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes, options: Any, message: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    opened = path if path.parent == tmp_path else path.parent
    for kind in (str, Path):
        assert re.search(message, refused(kind(opened), **options), re.DOTALL)


def test_a_parquet_file_without_rows(tmp_path: Path) -> None:
    assert "the file has no rows" in refused(parquet(tmp_path / "none.parquet", [], row_group_size=1))


def test_a_file_that_changed_gives_no_stale_rows(tmp_path: Path) -> None:
    for make, name in ((parquet, "a.parquet"), (jsonl, "a.jsonl")):
        assert open_rows(make(tmp_path / name, [{"x": 1}]))[0] == {"x": 1}
        before = os.stat(tmp_path / name)
        make(tmp_path / name, [{"x": 2}])
        os.utime(tmp_path / name, ns=(before.st_atime_ns, before.st_mtime_ns))  # even with the old date
        assert open_rows(tmp_path / name)[0] == {"x": 2}


def test_no_space_to_unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __enter__(self):
            raise OSError(28, "No space left on device")

        def __exit__(self, *exception):
            """Nothing to close."""

    monkeypatch.setattr("tempfile.TemporaryFile", Full)
    assert "set TMPDIR to a directory with space" in refused(parquet(tmp_path / "a.parquet", ROWS))


def damaged(raw: bytes, rng: random.Random) -> bytes:
    broken = bytearray(raw)
    for _ in range(rng.choice([1, 3, 20])):
        broken[rng.randrange(len(broken))] = rng.randrange(256)
    return bytes(broken[: rng.randrange(1, len(broken))] if rng.random() < 0.2 else broken)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_damaged_files_are_errors_of_ours_or_readable(tmp_path: Path, kind: str) -> None:
    """Any bytes may have changed. A number may then be another; but nothing crashes, and nothing else is raised."""
    rng = random.Random(kind)
    if kind == "parquet":
        source = path = parquet(tmp_path / "a.parquet", ROWS, row_group_size=3)
    else:
        source = saved(tmp_path / "saved", ROWS)
        [path] = source.glob("*.arrow")
    raw, refusals = path.read_bytes(), 0
    for _ in range(120):
        path.unlink()
        path.write_bytes(damaged(raw, rng))
        try:
            rows = open_rows(source)
            rows.sizes()
        except DataError:
            refusals += 1
            continue
        for number in range(len(rows)):
            try:
                rows[number]
            except DataError as error:
                assert "damaged" in str(error)  # noqa: PT017
    assert refusals > 30


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
def test_damaged_descriptions_of_saved_data(tmp_path: Path, name: str) -> None:
    source = saved(tmp_path / "saved", ROWS)
    (source / name).write_text("{")
    assert "cannot be read as a folder of datasets.save_to_disk" in refused(source)
    shutil.rmtree(source)
    source = saved(tmp_path / "saved", ROWS)
    next(source.glob("*.arrow")).unlink()
    assert "cannot be read as a folder of datasets.save_to_disk" in refused(source)

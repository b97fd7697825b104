"""RewardData and pairs on disk: whole or not at all; damage is a clear error, and never wrong data or a crash."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_forked import run_program
from tensordict import LazyStackedTensorDict, TensorDict

from rlframework.base.errors import BatchTypeError, DataError, WriteError
from rlframework_preferences.pairs import PreferencePairs
from rlframework_preferences.reward_data import RewardData

INNER = "_tensordict"


def rewards(rows: int = 3) -> RewardData:
    ids = torch.arange(rows * 4).view(rows, 4)
    return RewardData.from_lengths(ids, torch.arange(rows) + 1, end_scores=torch.arange(rows) / 4)


def pairs() -> PreferencePairs:
    return PreferencePairs(rewards(), rewards(), torch.tensor([1, 1, 0]), batch_size=[3])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rewards().save(tmp_path / "a")
    return tmp_path / "a"


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))


def set_in(*keys: str, value: Any) -> Callable[[Path], None]:
    """Change one entry of the inner meta file."""

    def change(folder: Path) -> None:
        def put(meta: dict[str, Any]) -> None:
            for key in keys[:-1]:
                meta = meta[key]
            meta[keys[-1]] = value

        edit(folder / INNER / "meta.json", put)

    return change


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink() if (folder / name).is_file() else shutil.rmtree(folder / name)


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def replace_by_folder(name: str) -> Callable[[Path], object]:
    return lambda folder: ((folder / name).unlink(), (folder / name).mkdir())


DAMAGES = {
    "no folder": (shutil.rmtree, r"No such file or directory: .*a/meta\.json"),
    "a file": (lambda folder: (shutil.rmtree(folder), folder.write_text("x")), "Not a directory"),
    "deep meta": (write("meta.json", b"[" * 100_000), "a: cannot be loaded: "),
    "meta without class": (write("meta.json", b"{}"), "a: cannot be loaded: "),
    "unknown class": (write("meta.json", b'{"_type": "<class \'a.B\'>"}'), r"a\.B"),
    "pickled data": (write("other.pickle", pickle.dumps({"rewards": print})), "pickle"),
    "no inner folder": (remove(INNER), f"the folder {INNER} next to it is missing"),
    "no inner meta": (remove(f"{INNER}/meta.json"), rf"{INNER}/meta\.json"),
    "newer format": (set_in("_format_version", value=99), "cannot be loaded: .*format version 99"),
    "no batch size": (
        lambda folder: edit(folder / INNER / "meta.json", lambda meta: meta.pop("shape")),
        "has no batch size",
    ),
    "batch size": (set_in("shape", value=[2]), r"shape \[3(, 4)?\], which does not begin with the batch size \[2\]"),
    "names": (set_in("_names", value=["a", "b", "c"]), r"dimension names \['a', 'b', 'c'\]"),
    "dtype": (set_in("input_ids", "dtype", value="torch.int32"), r"input_ids\.memmap has 96 bytes, .* takes 48 bytes"),
    "negative shape": (set_in("input_ids", "shape", value=[-3, -4]), "negative"),
    "unknown field": (set_in("inputs", value={"dtype": "torch.int64", "shape": [0], "device": "cpu"}), "inputs"),
    "a field is missing": (
        lambda folder: edit(folder / INNER / "meta.json", lambda meta: meta.pop("attention_mask")),
        r"\['attention_mask'\] of RewardData are missing",
    ),
    "no data file": (remove(f"{INNER}/input_ids.memmap"), r"input_ids\.memmap is missing"),
    "cut data file": (cut(f"{INNER}/input_ids.memmap", 95), r"input_ids\.memmap has 95 bytes, but .* takes 96 bytes"),
    "long data file": (cut(f"{INNER}/input_ids.memmap", 97), "has 97 bytes, but torch.int64 of shape .* takes 96"),
    "data is a folder": (replace_by_folder(f"{INNER}/input_ids.memmap"), r"input_ids\.memmap is not a regular file"),
    "a nested field's folder": (set_in("input_ids", value={"type": "TensorDict"}), "the folder .*input_ids is missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_told(folder: Path, name: str) -> None:
    damage, told = DAMAGES[name]
    damage(folder)  # type: ignore[operator]
    for device in (None, "meta"):
        with pytest.raises(DataError, match=told):
            RewardData.load(folder, device)


def test_a_folder_of_another_class_is_rejected(tmp_path: Path) -> None:
    class Rated(RewardData):
        rating: torch.Tensor | None = None

    rated = Rated(torch.ones(2, 3).int(), torch.ones(2, 3).bool(), rating=torch.tensor([1, 2]), batch_size=[2])
    rated.save(tmp_path / "rated")
    pairs().save(tmp_path / "pairs")
    rewards().to_tensordict().save(tmp_path / "plain")
    for name, message in (
        ("pairs", r"holds a PreferencePairs, not a RewardData; load it with PreferencePairs\.load"),
        ("plain", "holds a TensorDict, not a RewardData; load it with TensorDict"),
        ("rated", "holds a Rated, not a RewardData"),
    ):
        with pytest.raises(DataError, match=message):
            RewardData.load(tmp_path / name)
    assert Rated.load(tmp_path / "rated").rating.tolist() == [1, 2]
    plain = RewardData.from_tensordict(TensorDict.load_memmap(tmp_path / "plain"))
    assert plain.input_lengths.tolist() == [1, 2, 3]


def test_files_that_nobody_asks_for_are_no_error(folder: Path) -> None:
    for name in ("README", "rewards.memmap", f"{INNER}/rewards.memmap", f"{INNER}/.DS_Store"):
        (folder / name).write_text("hello")
    (folder / INNER / "more").mkdir()
    loaded = RewardData.load(folder)
    assert loaded.rewards is None
    assert loaded.input_ids.flatten().tolist() == list(range(12))


def leaves(data: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of `data`, with the path of their file."""
    for key, value in data._tensordict.items():
        if isinstance(value, torch.Tensor):
            yield f"{INNER}/{key}.memmap", value
        else:
            yield from ((f"{INNER}/{key}/{path}", leaf) for path, leaf in leaves(value))


WHOLE = {RewardData: rewards(), PreferencePairs: pairs()}
FILES = {cls: ["meta.json", f"{INNER}/meta.json", *(path for path, _ in leaves(data))] for cls, data in WHOLE.items()}
FILES[PreferencePairs] += [
    f"{INNER}/{side}/{meta}" for side in ("chosen", "rejected") for meta in FILES[RewardData][:2]
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[type, Path]:
    place = tmp_path_factory.mktemp("whole")
    return {cls: place / cls.__name__ for cls in WHOLE if WHOLE[cls].save(place / cls.__name__) is not None}


KINDS = ["delete", "cut", "extend", "flip", "garble", "insert", "folder"]


def harm(path: Path, kind: str, where: float, junk: bytes) -> None:
    """Damage one file. `where` is a place in it, from 0 to 1."""
    if not path.is_file():
        return
    content = bytearray(path.read_bytes())
    place = int(where * len(content))
    if kind in ("delete", "folder"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
    elif kind == "cut":
        path.write_bytes(content[:place])
    elif kind == "extend":
        path.write_bytes(content + junk)
    elif kind == "flip" and content:
        content[min(place, len(content) - 1)] ^= 1 << (junk[0] % 8)
        path.write_bytes(content)
    elif kind == "garble":
        content[place : place + len(junk)] = junk
        path.write_bytes(content)
    elif kind == "insert":
        content[place:place] = junk
        path.write_bytes(content)


@pytest.mark.slow
@given(
    cls=st.sampled_from([RewardData, PreferencePairs]),
    harms=st.lists(
        st.tuples(st.integers(0, 99), st.sampled_from(KINDS), st.floats(0, 1), st.binary(min_size=1, max_size=9)),
        min_size=1,
        max_size=3,
    ),
    meta=st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_any_damage_gives_an_error_or_the_data_that_is_there(
    saved: dict[type, Path], cls: Any, harms: list[tuple[int, str, float, bytes]], meta: bool
) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "copy"
        shutil.copytree(saved[cls], folder)
        for number, kind, where, junk in harms:
            harm(folder / FILES[cls][number % len(FILES[cls])], kind, where, junk)
        try:
            loaded = cls.load(folder, "meta" if meta else None)
        except DataError:
            return
        assert loaded.batch_size == WHOLE[cls].batch_size
        found = dict(leaves(loaded))
        expected = dict(leaves(WHOLE[cls]))
        assert found.keys() == expected.keys()
        for path, leaf in found.items():
            assert (leaf.dtype, leaf.shape) == (expected[path].dtype, expected[path].shape)
            if not meta:
                there = torch.frombuffer(bytearray((folder / path).read_bytes()), dtype=torch.uint8)
                assert torch.equal(leaf.as_subclass(torch.Tensor).view(torch.uint8).flatten(), there)


def test_saved_data_is_mapped_and_checked(tmp_path: Path) -> None:
    inner = TensorDict({"x": torch.ones(3, 2)}, batch_size=[3])
    saved = RewardData(inner, torch.ones(3, 4), batch_size=[3]).save(tmp_path / "nested")
    saved.get(("input_ids", "x"))[0, 0] = 8  # written through to the file
    assert RewardData.load(tmp_path / "nested").get(("input_ids", "x"))[0].tolist() == [8, 1]
    data = RewardData(
        torch.arange(8).view(4, 2).t(),
        torch.ones(1, 4, dtype=torch.bool).expand(2, 4),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True),
        batch_size=[2],
    )
    data.save(tmp_path / "views")
    loaded = RewardData.load(tmp_path / "views")
    assert loaded.input_ids.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert loaded.attention_mask.tolist() == [[True] * 4] * 2
    assert (loaded.rewards.dtype, loaded.rewards.tolist()) == (torch.bfloat16, [1.0, 2.0])
    shell = RewardData.load(tmp_path / "views", "meta")
    assert (shell.input_ids.is_meta, shell.check().input_ids.shape) == (True, (2, 4))
    for few in (rewards(0), rewards(1)[0]):
        assert few.save(tmp_path / "few").input_ids.shape == few.input_ids.shape


def test_a_mapping_outlives_the_folder_that_it_maps(tmp_path: Path) -> None:
    """A new folder of another size replaces a mapped one, and nothing of the mapping changes."""
    old = rewards(3).save(tmp_path / "a")
    loaded = RewardData.load(tmp_path / "a")
    assert rewards(1).save(tmp_path / "a").input_ids.tolist() == [[0, 1, 2, 3]]
    for mapped in (old, loaded):
        assert mapped.input_ids.flatten().tolist() == list(range(12))
    assert os.listdir(tmp_path) == ["a"]
    loaded[1:].save(tmp_path / "a")  # the old data is written, not what is under its name by now
    assert RewardData.load(tmp_path / "a").input_ids.flatten().tolist() == list(range(4, 12))


def test_a_full_disk_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards().save(tmp_path / "a")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for name in ("a", "new"):
        with pytest.raises(WriteError, match="there is no space left on the device"):
            rewards(2).save(tmp_path / name)
    assert os.listdir(tmp_path) == ["a"]
    assert RewardData.load(tmp_path / "a").input_ids.flatten().tolist() == list(range(12))


@pytest.mark.slow
def test_a_kill_while_saving_leaves_the_old_folder(tmp_path: Path) -> None:
    rewards().save(tmp_path / "a")
    script = (
        "import os, signal, torch\n"
        "from rlframework_preferences import memmap\n"
        "from rlframework_preferences.reward_data import RewardData\n"
        "memmap.reserve = lambda folder: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"RewardData.from_lengths(torch.ones(9, 4).int(), torch.ones(9).int()).save({str(tmp_path / 'a')!r})"
    )
    assert run_program(script).returncode == -9
    assert RewardData.load(tmp_path / "a").input_ids.flatten().tolist() == list(range(12))


def test_files_of_others_are_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"home holds letter\.txt, which saving would delete"):
        rewards().save(tmp_path / "home")
    with pytest.raises(DataError, match="file is a file"):
        rewards().save(tmp_path / "file")
    assert (tmp_path / "home" / "letter.txt").read_text() == "dear"
    (tmp_path / "empty").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("empty")
    rewards(2).save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o700
    assert RewardData.load(tmp_path / "link").batch_size == torch.Size([2])


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (RewardData(TensorDict({"text": "abc"}, [2]), torch.ones(2, 4), batch_size=[2]), "must be dense tensors"),
        (
            RewardData(LazyStackedTensorDict(TensorDict({}), TensorDict({})), torch.ones(2, 4), batch_size=[2]),
            "must be dense tensors",
        ),
        (RewardData.lazy_stack([rewards(1), rewards(1)]), "must be dense tensors"),
        (
            RewardData(TensorDict({"a/b": torch.ones(2)}, [2]), torch.ones(2, 4), batch_size=[2]),
            "under plain names .*a/b",
        ),
        (
            RewardData(TensorDict({"shape": torch.ones(2)}, [2]), torch.ones(2, 4), batch_size=[2]),
            "'shape'.* cannot be names of saved fields",
        ),
        (RewardData(torch.ones(2, 4).to_sparse(), torch.ones(2, 4), batch_size=[2]), "must be dense tensors"),
        (
            RewardData(torch.ones(2, 4, device="meta"), torch.ones(2, 4), batch_size=[2]),
            "must be dense tensors",
        ),
    ],
)
def test_what_cannot_be_saved_is_told_before_anything_is_written(tmp_path: Path, data: RewardData, told: str) -> None:
    with pytest.raises(BatchTypeError, match=told):
        data.save(tmp_path / "a")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("former", ["rlframework.datasets", "rlframework.data"])
def test_folders_of_releases_that_had_the_classes_elsewhere(tmp_path: Path, former: str) -> None:
    """`meta.json` names the class, whose module has had other names."""
    whole = rewards()
    whole.save(tmp_path / "rewards")
    both = PreferencePairs(whole, whole.clone(), torch.zeros(3, dtype=torch.int64), batch_size=[3])
    both.save(tmp_path / "pairs")
    metas = [tmp_path / "rewards" / "meta.json", *(tmp_path / "pairs").rglob("meta.json")]
    renamed = [meta for meta in metas if "rlframework_preferences." in meta.read_text()]
    assert len(renamed) == 4  # the rewards, the pairs, and the two sides of the pairs
    for meta in renamed:
        text = meta.read_text().replace("rlframework_preferences.pairs", f"{former}.preferences")
        meta.write_text(text.replace("rlframework_preferences.reward_data", f"{former}.reward_data"))
    assert RewardData.load(tmp_path / "rewards").input_ids.equal(whole.input_ids)
    loaded = PreferencePairs.load(tmp_path / "pairs")
    assert isinstance(loaded.chosen, RewardData)
    assert loaded.check().rejected.input_ids.equal(whole.input_ids)
    PreferencePairs.load(tmp_path / "pairs").save(tmp_path / "again")
    assert "rlframework_preferences.pairs" in (tmp_path / "again" / "meta.json").read_text()

"""Folders that are damaged, half-written or somebody else's: a clear error, and never wrong data or a crash."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorClass, TensorDict, tensorclass
from torch._subclasses import FakeTensorMode

from rlframework.base.errors import DataError
from rlframework_preferences.pairs import PreferencePairs
from rlframework_preferences.reward_data import RewardData

INNER = "_tensordict"


@tensorclass
class Stranger:
    """A tensorclass that is none of ours."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor


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
    whole = rewards()
    for load in (
        lambda: RewardData.load_memmap(folder),
        lambda: RewardData.load(folder, device="cpu"),
        lambda: RewardData.load_memmap(folder, "meta"),
        lambda: RewardData.load_memmap(folder, out=rewards()),
        lambda: whole.load_memmap_(folder),
    ):
        with pytest.raises(DataError, match=told):
            load()
    with FakeTensorMode(), pytest.raises(DataError, match=told):
        RewardData.load_memmap(folder)
    assert whole.input_ids.flatten().tolist() == list(range(12))


def test_folders_of_other_classes(tmp_path: Path) -> None:
    pairs().save(tmp_path / "pairs")
    rewards().save(tmp_path / "rewards")
    rewards().to_tensordict().save(tmp_path / "plain")
    Stranger(torch.ones(2, 4), torch.ones(2, 4), batch_size=[2]).save(tmp_path / "stranger")
    for cls, name, told in (
        (RewardData, "pairs", r"holds a PreferencePairs, not a RewardData; load it with PreferencePairs\.load_memmap"),
        (PreferencePairs, "rewards", "holds a RewardData, not a PreferencePairs"),
        (RewardData, "plain", "holds a TensorDict, not a RewardData; load it with TensorDict"),
        (RewardData, "stranger", "holds a Stranger, not a RewardData"),
    ):
        with pytest.raises(DataError, match=told):
            cls.load_memmap(tmp_path / name)
    plain = RewardData.from_tensordict(TensorDict.load_memmap(tmp_path / "plain"))
    assert plain.input_lengths.tolist() == [1, 2, 3]


def test_a_class_of_the_users_own(tmp_path: Path) -> None:
    class Rated(RewardData):
        rating: torch.Tensor | None = None

    data = Rated(torch.ones(2, 3).int(), torch.ones(2, 3).bool(), rating=torch.tensor([1, 2]), batch_size=[2])
    data.save(tmp_path / "rated")
    loaded = Rated.load_memmap(tmp_path / "rated")
    assert type(loaded) is Rated
    assert loaded.rating.tolist() == [1, 2]
    assert loaded.input_lengths.tolist() == [3, 3]
    with pytest.raises(DataError, match="holds a Rated, not a RewardData"):
        RewardData.load_memmap(tmp_path / "rated")
    assert issubclass(Rated, TensorClass)


def test_files_that_nobody_asks_for_are_no_error(folder: Path) -> None:
    for name in ("README", "rewards.memmap", f"{INNER}/rewards.memmap", f"{INNER}/.DS_Store"):
        (folder / name).write_text("hello")
    (folder / INNER / "more").mkdir()
    loaded = RewardData.load_memmap(folder)
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
    return {cls: data.save(place / cls.__name__).saved_path for cls, data in WHOLE.items()}


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
            loaded = cls.load_memmap(folder, "meta" if meta else None)
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


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["shape", "dtype", "device", "type", "is_nested", "_type", "_names", "_format_version"])
                | st.text(max_size=6),
                inner,
                max_size=4,
            )
        ),
        max_leaves=8,
    ),
    st.sampled_from(
        ["input_ids", "attention_mask", "end_scores", "rewards", "shape", "device", "_type", "_names", "x"]
    ),
)
@settings(deadline=None, max_examples=150)
def test_any_entry_of_a_meta_file(saved: dict[type, Path], value: Any, key: str) -> None:
    """A meta file that is JSON, with one entry that may be anything."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "copy"
        shutil.copytree(saved[RewardData], folder)
        set_in(key, value=value)(folder)
        try:
            loaded = RewardData.load_memmap(folder)
        except DataError:
            return
        for name, leaf in leaves(WHOLE[RewardData]):
            assert torch.equal(dict(leaves(loaded))[name], leaf)

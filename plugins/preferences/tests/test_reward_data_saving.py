"""Saving RewardData: whole or not at all, over folders that are mapped, and refreshed from them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_forked import run_program
from tensordict import LazyStackedTensorDict, TensorDict

from rlframework.base.errors import BatchError, BatchTypeError, DataError, WriteError
from rlframework_preferences.pairs import PreferencePairs
from rlframework_preferences.reward_data import RewardData


def make(rows: int = 3, start: int = 0, **values: Any) -> RewardData:
    ids = torch.arange(start, start + rows * 4).view(rows, 4)
    return RewardData.from_lengths(ids, torch.full((rows,), 2), **values)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_mapping_outlives_the_folder_that_it_maps(tmp_path: Path) -> None:
    """A new folder of another size takes the place of a mapped one: nothing of the mapping changes."""
    old = make(3).save(tmp_path / "a")
    loaded = RewardData.load(tmp_path / "a")
    new = make(1, start=50).save(tmp_path / "a")
    assert old.input_ids.flatten().tolist() == list(range(12))
    assert loaded.input_ids.flatten().tolist() == list(range(12))
    assert new.input_ids.flatten().tolist() == [50, 51, 52, 53]
    assert names(tmp_path) == ["a"]
    new.input_ids[0, 0] = 7
    assert RewardData.load(tmp_path / "a").input_ids[0, 0] == 7
    old.save(tmp_path / "a")  # the old data is written, not what is under its name by now
    assert RewardData.load(tmp_path / "a").input_ids.flatten().tolist() == list(range(12))


def test_what_comes_back_maps_the_final_files(tmp_path: Path) -> None:
    inner = TensorDict({"x": torch.ones(3, 2)}, batch_size=[3])
    data = RewardData(inner, torch.ones(3, 4), batch_size=[3])
    for saved in (data.save(tmp_path / "a"), data.memmap_like(tmp_path / "b"), data.memmap_(tmp_path / "c")):
        folder = saved.saved_path
        assert folder in (tmp_path / "a", tmp_path / "b", tmp_path / "c")
        nested = saved.get(("input_ids", "x"))
        assert nested.filename == str(folder / "_tensordict" / "input_ids" / "x.memmap")
        nested[0, 0] = 8
        assert RewardData.load(folder).get(("input_ids", "x"))[0, 0] == 8
    assert names(tmp_path) == ["a", "b", "c"]


@pytest.mark.slow
@pytest.mark.parametrize("loaded", [True, False])
def test_refreshing_after_another_process_saved(tmp_path: Path, loaded: bool) -> None:
    saved = make().save(tmp_path / "a")
    mine = RewardData.load_memmap(tmp_path / "a") if loaded else saved
    script = (
        "import torch; from rlframework_preferences.reward_data import RewardData\n"
        "RewardData.from_lengths(torch.full((3, 4), 9), torch.tensor([1, 2, 3]), end_scores=torch.ones(3))"
        f".save({str(tmp_path / 'a')!r})"
    )
    run_program(script).check_returncode()
    assert mine.input_ids[0, 1] == 1
    assert mine.memmap_refresh_() is mine
    assert mine.input_ids.tolist() == [[9] * 4] * 3
    assert mine.input_lengths.tolist() == [1, 2, 3]
    assert mine.end_scores.tolist() == [1.0, 1.0, 1.0]
    assert mine.is_memmap() is not loaded
    assert mine.is_locked is not loaded
    assert mine.memmap_refresh_().saved_path == tmp_path / "a"


def test_what_cannot_be_refreshed_stays_as_it_was(tmp_path: Path) -> None:
    for data in (make(), make().memmap(), make().save(tmp_path / "b")[1:]):
        with pytest.raises(DataError, match="this RewardData is not mapped from a folder"):
            data.memmap_refresh_()
    saved = make(3).save(tmp_path / "a")
    make(2).save(tmp_path / "a")
    with pytest.raises(BatchError, match=r"batch size of the folder is \[2\], that of this object \[3\]"):
        saved.memmap_refresh_()
    (tmp_path / "a" / "meta.json").unlink()
    with pytest.raises(DataError, match=r"No such file .*meta\.json"):
        saved.memmap_refresh_()
    assert saved.is_memmap()
    assert saved.is_locked
    assert saved.input_ids.flatten().tolist() == list(range(12))


def test_loading_into_what_does_not_fit(tmp_path: Path) -> None:
    make(2).save(tmp_path / "a")
    data = make(3)
    with pytest.raises(BatchError, match=r"batch size of the folder is \[2\], that of this object \[3\]"):
        RewardData.load_memmap(tmp_path / "a", out=data)
    with pytest.raises(BatchError, match="batch size of the folder"):
        data.load_memmap_(tmp_path / "a")
    with pytest.raises(BatchTypeError, match="out is a TensorDict; it must be a RewardData"):
        RewardData.load_memmap(tmp_path / "a", out=TensorDict({}, [2]))  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="out is locked"):
        RewardData.load_memmap(tmp_path / "a", out=make(2).lock_())
    assert data.input_ids.flatten().tolist() == list(range(12))


@pytest.mark.slow
def test_a_field_is_added_to_a_saved_folder(tmp_path: Path) -> None:
    make().save(tmp_path / "a")
    data = RewardData.load(tmp_path / "a")
    data.rewards = torch.tensor([1.0, 2.0, 3.0])
    assert data.save().rewards.tolist() == [1.0, 2.0, 3.0]
    again = RewardData.load(tmp_path / "a")
    assert again.rewards.tolist() == [1.0, 2.0, 3.0]
    assert again.input_ids.flatten().tolist() == list(range(12))
    again[1:].save(tmp_path / "a")
    assert RewardData.load(tmp_path / "a").input_ids.flatten().tolist() == list(range(4, 12))


def test_data_on_disk_is_not_copied_unasked(tmp_path: Path) -> None:
    loaded = make().save(tmp_path / "a")
    for data in (loaded, loaded[1:]):
        with pytest.raises(RuntimeError, match="copy_existing=True"):
            data.save(tmp_path / "b")
        assert names(tmp_path) == ["a"]
    copied = loaded[1:].save(tmp_path / "b", copy_existing=True)
    assert copied.input_ids.flatten().tolist() == list(range(4, 12))
    copied.input_ids[0, 0] = 99
    assert loaded.input_ids[1, 0] == 4


def test_mapped_fields_in_each_others_place(tmp_path: Path) -> None:
    data = make(rewards=torch.tensor([1.0, 2.0, 3.0]), end_scores=torch.tensor([4.0, 5.0, 6.0]))
    data.save(tmp_path / "a")
    data = RewardData.load(tmp_path / "a")
    data.rewards, data.end_scores = data.end_scores, data.rewards
    data.save(tmp_path / "a")
    again = RewardData.load(tmp_path / "a")
    assert again.rewards.tolist() == [4.0, 5.0, 6.0]
    assert again.end_scores.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("method", ["save", "memmap_", "memmap_like"])
def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    make().save(tmp_path / "a")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    data = make(5, start=70)
    monkeypatch.setattr(os, "posix_fallocate", full)
    for place in ("a", "new"):
        with pytest.raises(WriteError, match="there is no space left on the device"):
            getattr(data, method)(tmp_path / place)
    assert names(tmp_path) == ["a"]
    assert RewardData.load(tmp_path / "a").input_ids.flatten().tolist() == list(range(12))
    assert not data.is_memmap()
    assert data.input_ids[0, 0] == 70


@pytest.mark.slow
def test_a_process_that_is_killed_while_saving_leaves_the_old_folder(tmp_path: Path) -> None:
    make().save(tmp_path / "a")
    script = (
        "import os, signal, torch\n"
        "from rlframework_preferences import memmap\n"
        "from rlframework_preferences.reward_data import RewardData\n"
        "memmap.reserve = lambda folder: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"RewardData.from_lengths(torch.ones(9, 4).int(), torch.ones(9).int()).save({str(tmp_path / 'a')!r})"
    )
    assert run_program(script).returncode == -9
    assert RewardData.load(tmp_path / "a").input_ids.flatten().tolist() == list(range(12))


def test_nobodys_files_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("x")
    make().save(tmp_path / "saved")
    (tmp_path / "saved" / "notes.md").write_text("x")
    for method in ("save", "memmap_", "memmap_like"):
        with pytest.raises(DataError, match=r"home holds letter\.txt, which saving would delete"):
            getattr(make(), method)(tmp_path / "home")
        with pytest.raises(DataError, match=r"saved holds notes\.md"):
            getattr(make(), method)(tmp_path / "saved")
        with pytest.raises(DataError, match="file is a file"):
            getattr(make(), method)(tmp_path / "file")
    assert names(tmp_path) == ["file", "home", "saved"]
    assert (tmp_path / "home" / "letter.txt").read_text() == "dear"
    assert RewardData.load(tmp_path / "saved").input_lengths.tolist() == [2, 2, 2]


def test_an_empty_folder_a_link_and_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir(mode=0o700)
    make().save(tmp_path / "empty")
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to("empty")
    saved = make(2).save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert saved.saved_path == tmp_path / "empty"
    assert RewardData.load(tmp_path / "link").batch_size == torch.Size([2])
    monkeypatch.chdir(tmp_path)
    assert make().save("deep/er").saved_path == tmp_path / "deep" / "er"
    assert RewardData.load("deep/er").memmap_refresh_().input_lengths.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (RewardData(TensorDict({"text": "abc"}, [2]), torch.ones(2, 4), batch_size=[2]), "must be dense tensors"),
        (
            RewardData(LazyStackedTensorDict(TensorDict({}), TensorDict({})), torch.ones(2, 4), batch_size=[2]),
            "must be dense tensors",
        ),
        (RewardData.lazy_stack([make(1), make(1)]), "must be dense tensors"),
        (
            RewardData(TensorDict({"a/b": torch.ones(2)}, [2]), torch.ones(2, 4), batch_size=[2]),
            "under plain names .*a/b",
        ),
        (
            RewardData(TensorDict({"shape": torch.ones(2)}, [2]), torch.ones(2, 4), batch_size=[2]),
            "'shape'.* cannot be names of saved fields",
        ),
        (RewardData(torch.ones(2, 4).to_sparse(), torch.ones(2, 4), batch_size=[2]), "'input_ids' is torch.sparse"),
        (
            RewardData(torch.ones(2, 4, device="meta"), torch.ones(2, 4), batch_size=[2]),
            "'input_ids' is on the meta dev",
        ),
    ],
)
def test_what_cannot_be_saved_is_told_before_anything_is_written(tmp_path: Path, data: RewardData, told: str) -> None:
    for method in ("save", "memmap_"):
        with pytest.raises(BatchTypeError, match=told):
            getattr(data, method)(tmp_path / "a")
    assert names(tmp_path) == []


def test_gradients_views_and_empty_tensors_are_saved(tmp_path: Path) -> None:
    data = RewardData(
        torch.arange(8).view(4, 2).t(),
        torch.ones(1, 4, dtype=torch.bool).expand(2, 4),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True),
        batch_size=[2],
    )
    data.save(tmp_path / "a")
    loaded = RewardData.load(tmp_path / "a")
    assert loaded.input_ids.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert loaded.attention_mask.tolist() == [[True] * 4] * 2
    assert loaded.rewards.dtype == torch.bfloat16
    assert loaded.rewards.tolist() == [1.0, 2.0]
    make(0).save(tmp_path / "none")
    assert RewardData.load(tmp_path / "none").input_ids.shape == (0, 4)
    row = make(1)[0]
    row.save(tmp_path / "row")
    assert RewardData.load(tmp_path / "row").input_ids.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("former", ["rlframework.datasets", "rlframework.data"])
def test_folders_of_releases_that_had_the_classes_elsewhere(tmp_path: Path, former: str) -> None:
    """`meta.json` names the class, whose module has had other names."""
    rewards = make(3)
    rewards.save(tmp_path / "rewards")
    pairs = PreferencePairs(rewards, rewards.clone(), torch.zeros(3, dtype=torch.int64), batch_size=[3])
    pairs.save(tmp_path / "pairs")
    metas = [tmp_path / "rewards" / "meta.json", *(tmp_path / "pairs").rglob("meta.json")]
    renamed = [meta for meta in metas if "rlframework_preferences." in meta.read_text()]
    assert len(renamed) == 4  # the rewards, the pairs, and the two sides of the pairs
    for meta in renamed:
        text = meta.read_text().replace("rlframework_preferences.pairs", f"{former}.preferences")
        meta.write_text(text.replace("rlframework_preferences.reward_data", f"{former}.reward_data"))
    assert RewardData.load_memmap(tmp_path / "rewards").input_ids.equal(rewards.input_ids)
    loaded = PreferencePairs.load_memmap(tmp_path / "pairs")
    assert isinstance(loaded.chosen, RewardData)
    assert loaded.check().rejected.input_ids.equal(rewards.input_ids)
    PreferencePairs.load_memmap(tmp_path / "pairs").save(tmp_path / "again", copy_existing=True)
    assert "rlframework_preferences.pairs" in (tmp_path / "again" / "meta.json").read_text()

"""Saves replace former saves, and never a directory or file of the user's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rlframework.base.errors import UserError
from rlframework.huggingface.model_directories import check_replaceable, make_llama
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.policy.client import Policy


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "proj"
    (folder / "src").mkdir(parents=True)
    for name in ("notes.md", "config.json", "src/train.py"):
        (folder / name).write_text("mine")
    return folder


def test_a_directory_of_the_users_is_not_replaced(project: Path) -> None:
    unreachable = SimpleNamespace()  # a policy without workers: a call of one is an AttributeError
    policy = object.__new__(Policy)
    policy._calls = unreachable
    before = files_in(project)
    for save in (
        lambda path: policy.save_pretrained(path),
        lambda path: policy.save_adapter(path),
        lambda path: policy.save_checkpoint(path, None),
        lambda path: policy.save_checkpoint(str(project.parent / "new"), path),
        lambda path: make_llama(path, character_tokenizer("ab"), hidden=8, layers=1, heads=2),
    ):
        with pytest.raises(UserError, match=r"files that no save wrote \(notes\.md, src\); give another directory"):
            save(str(project))
        with pytest.raises(UserError, match=r"notes\.md.: it is a file"):
            save(str(project / "notes.md"))
        with pytest.raises(UserError, match="give the name of a directory"):
            save(".")
    assert files_in(project) == before
    assert not (project.parent / "new").exists()


def test_a_former_save_may_be_replaced(tmp_path: Path) -> None:
    for name in ("missing", "made", "made"):
        make_llama(tmp_path / name, character_tokenizer("ab"), hidden=8, layers=1, heads=2)
    (tmp_path / "empty").mkdir()
    check_replaceable(tmp_path / "empty")
    written = "model-00001-of-00002.safetensors model.safetensors.index.json checksums.json training.json native.json"
    written += " save.json"
    for name in [*written.split(), "random.safetensors", ".metadata", "__0_0.distcp", "vocab.json", "engine/x"]:
        path = tmp_path / "made" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        check_replaceable(tmp_path / "made")


@pytest.mark.parametrize("name", ["engine/x", "data.safetensors", "results.json", ".git/config", "train.py", "x.model"])
def test_a_model_beside_other_files_is_not_a_former_save(tmp_path: Path, name: str) -> None:
    made = make_llama(tmp_path / "made", character_tokenizer("ab"), hidden=8, layers=1, heads=2)
    (made / name).parent.mkdir(exist_ok=True)
    (made / name).touch()
    with pytest.raises(UserError, match=name.partition("/")[0]):
        check_replaceable(made)

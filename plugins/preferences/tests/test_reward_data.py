"""RewardData as a tensorclass: every method of the interface."""

from __future__ import annotations

import copy
import doctest
import io
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict, is_tensorclass
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from rlframework_preferences.reward_data import RewardData

IDS = [[5, 6, 7, 0], [8, 9, 0, 0], [3, 0, 0, 0]]
MASK = [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
SCORES = [0.5, -1.0, 2.0]


def make(**changes: object) -> RewardData:
    fields = {
        "input_ids": torch.tensor(IDS),
        "attention_mask": torch.tensor(MASK, dtype=torch.bool),
        "end_scores": torch.tensor(SCORES),
        "batch_size": [3],
        **changes,
    }
    return RewardData(**fields)


def assert_same(data: RewardData) -> None:
    """`data` is what `make()` makes."""
    assert type(data) is RewardData
    assert data.batch_size == torch.Size([3])
    assert data.input_ids.tolist() == IDS
    assert data.input_ids.dtype == torch.int64
    assert data.attention_mask.int().tolist() == MASK
    assert data.attention_mask.dtype == torch.bool
    assert data.end_scores is not None
    assert data.end_scores.tolist() == SCORES
    assert data.rewards is None


def test_construction() -> None:
    data = make()
    assert is_tensorclass(data)
    assert_same(data)
    assert data.device is None
    assert data.names == [None]
    assert make(names=["rows"]).names == ["rows"]
    assert RewardData(torch.tensor(IDS), torch.tensor(MASK)).batch_size == torch.Size([])
    assert make(device="cpu").device == torch.device("cpu")
    assert make(device="meta").input_ids.is_meta
    assert len(data) == 3


def test_get_and_set() -> None:
    data = make()
    assert data.get("input_ids") is data.input_ids
    assert data.get("rewards") is None
    assert data.get("nothing", 17) == 17
    assert data.get(("input_ids", "deeper"), "none") == "none"
    assert data.set("rewards", torch.ones(3)) is data
    assert data.get("rewards").tolist() == [1.0, 1.0, 1.0]
    kept = data.rewards
    data.set("rewards", torch.full((3,), 2.0), inplace=True)
    assert data.rewards is kept
    assert kept.tolist() == [2.0, 2.0, 2.0]
    data.rewards = torch.zeros(3, 4)
    assert data.rewards.shape == (3, 4)
    with pytest.raises(AttributeError, match="no such field"):
        data.set("reward", torch.ones(3))
    with pytest.raises(RuntimeError, match="batch dimension mismatch"):
        data.set("rewards", torch.ones(2))


def test_nested_tensordicts(tmp_path: Path) -> None:
    inner = TensorDict({"a.b": torch.tensor(IDS), "image": {"pixels": torch.zeros(3, 2)}}, batch_size=[3])
    data = make(input_ids=inner)
    assert data.get(("input_ids", "sound"), None) is None
    data.set(("input_ids", "image", "pixels"), torch.ones(3, 5))
    data.save(tmp_path / "nested")
    for found in (data, RewardData.load(tmp_path / "nested")):
        assert found.get(("input_ids", "a.b")).tolist() == IDS
        assert found.get(("input_ids", ("image", "pixels"))).shape == (3, 5)
        assert found[1].input_ids["a.b"].tolist() == IDS[1]
        assert found.input_ids.batch_size == torch.Size([3])


def test_to_and_from_tensordict() -> None:
    data = make()
    plain = data.to_tensordict()
    assert type(plain) is TensorDict
    assert plain["input_ids"].tolist() == IDS
    assert plain["input_ids"].data_ptr() != data.input_ids.data_ptr()
    back = RewardData.from_tensordict(plain)
    assert_same(back)
    assert back.input_ids.data_ptr() == plain["input_ids"].data_ptr()
    with pytest.raises(ValueError, match="do not belong to the class"):
        RewardData.from_tensordict(TensorDict({"tokens": torch.zeros(2, 2)}, batch_size=[2]))


def test_unbind_and_indexing_share_storage() -> None:
    data = make()
    rows = data.unbind(0)
    assert len(rows) == 3
    for index, row in enumerate(rows):
        assert type(row) is RewardData
        assert row.batch_size == torch.Size([])
        assert row.input_ids.tolist() == IDS[index]
        assert row.input_ids.data_ptr() == data.input_ids[index].data_ptr()
    rows[1].input_ids[0] = 77
    assert data.input_ids[1, 0] == 77
    part = data[1:]
    assert part.batch_size == torch.Size([2])
    assert part.input_ids.data_ptr() == data.input_ids[1].data_ptr()
    picked = data[torch.tensor([2, 0])]
    assert picked.end_scores is not None
    assert picked.end_scores.tolist() == [2.0, 0.5]
    data[0] = picked[0]
    assert data.input_ids[0].tolist() == IDS[2]


def test_stack_cat_clone_and_to() -> None:
    data = make()
    stacked = torch.stack([data, data])
    assert type(stacked) is RewardData
    assert stacked.batch_size == torch.Size([2, 3])
    joined = torch.cat([data, data[:1]])
    assert type(joined) is RewardData
    assert joined.input_ids.tolist() == [*IDS, IDS[0]]
    for copied in (data.clone(), copy.deepcopy(data)):
        assert_same(copied)
        assert copied.input_ids.data_ptr() != data.input_ids.data_ptr()
    moved = data.to("meta")
    assert type(moved) is RewardData
    assert moved.device == torch.device("meta")
    assert_same(data)
    assert data.to(torch.float64).end_scores.dtype == torch.float64


def test_pickling(tmp_path: Path) -> None:
    assert_same(pickle.loads(pickle.dumps(make())))  # noqa: S301
    mapped = pickle.loads(pickle.dumps(make().memmap(tmp_path / "a")))  # noqa: S301
    assert_same(mapped)
    assert isinstance(mapped.input_ids, MemoryMappedTensor)
    assert mapped.saved_path == tmp_path / "a"


def test_state_dict() -> None:
    state = make().state_dict()
    assert set(state) == {"input_ids", "attention_mask", "end_scores"}
    other = make(input_ids=torch.zeros(3, 4, dtype=torch.int64), end_scores=torch.zeros(3))
    place = other.input_ids.data_ptr()
    assert other.load_state_dict(state) is other
    assert_same(other)
    assert other.input_ids.data_ptr() == place
    other = make(end_scores=torch.zeros(3))
    other.load_state_dict(state, assign=True)
    assert other.end_scores.data_ptr() == state["end_scores"].data_ptr()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert_same(make(end_scores=torch.zeros(3)).load_state_dict(torch.load(file, weights_only=False)))


def test_state_dict_options() -> None:
    data = make()
    assert set(data.state_dict(prefix="a.")) == {"a.input_ids", "a.attention_mask", "a.end_scores"}
    assert data.state_dict(destination=(there := OrderedDict())) is there
    assert set(there) == {"input_ids", "attention_mask", "end_scores"}
    nested = make(input_ids=TensorDict({"x": torch.tensor(IDS)}, batch_size=[3]))
    assert nested.state_dict()["input_ids"]["x"].tolist() == IDS
    assert nested.state_dict(flatten=True)["input_ids.x"].tolist() == IDS
    for flat in (True, False):
        for told in (flat, None):
            empty = make(input_ids=TensorDict({"x": torch.zeros(3, 4, dtype=torch.int64)}, batch_size=[3]))
            empty.load_state_dict(nested.state_dict(flatten=flat), from_flatten=told)
            assert empty.get(("input_ids", "x")).tolist() == IDS
    scored = make(rewards=torch.ones(3)).state_dict()
    with pytest.raises(KeyError, match="rewards"):
        make().load_state_dict(scored)
    assert make().load_state_dict(scored, strict=False).rewards is None


def test_save_and_load(tmp_path: Path) -> None:
    data = make(names=["rows"])
    saved = data.save(tmp_path / "a")
    for mapped in (saved, RewardData.load(tmp_path / "a"), RewardData.load_memmap(str(tmp_path / "a"))):
        assert_same(mapped)
        assert mapped.names == ["rows"]
        assert isinstance(mapped.input_ids, MemoryMappedTensor)
        assert mapped.input_ids.filename == str(tmp_path / "a" / "_tensordict" / "input_ids.memmap")
        assert mapped.saved_path == tmp_path / "a"
    assert type(data.input_ids) is Tensor
    assert saved.is_memmap()
    assert saved.is_locked
    assert TensorDict.load_memmap(tmp_path / "a").end_scores.tolist() == SCORES


@pytest.mark.parametrize("method", ["memmap", "memmap_"])
def test_mapped_data_is_locked_but_written_in_place(tmp_path: Path, method: str) -> None:
    data = make()
    for place in ([], [tmp_path / "a"]):  # shared memory, and a folder
        mapped = getattr(data, method)(*place)
        assert (mapped is data) is (method == "memmap_")
        assert_same(mapped)
        assert mapped.is_memmap()
        assert mapped.is_locked
    with pytest.raises(RuntimeError, match="locked"):
        mapped.rewards = torch.ones(3)
    mapped.end_scores[1] = 9.0
    assert RewardData.load(tmp_path / "a").end_scores.tolist() == [0.5, 9.0, 2.0]
    assert type(mapped.to_tensordict()["input_ids"]) is Tensor
    mapped.unlock_()
    assert not mapped.is_memmap()
    mapped.rewards = torch.ones(3)
    assert mapped.rewards.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("method", ["memmap", "memmap_", "save", "memmap_like"])
def test_threads_and_futures(tmp_path: Path, method: str) -> None:
    done = getattr(make(), method)(tmp_path / "now", num_threads=2)
    later = getattr(make(), method)(tmp_path / "later", num_threads=2, return_early=True, share_non_tensor=True)
    for result in (done, later.result()):
        assert result.is_memmap()
        assert result.is_locked
        assert result.input_ids.tolist() == ([[0] * 4] * 3 if method == "memmap_like" else IDS)
    if method != "memmap_like":
        assert_same(RewardData.load(tmp_path / "later"))


def test_an_error_of_an_early_return_comes_with_the_result(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    later = make().memmap(tmp_path / "file", num_threads=1, return_early=True)
    with pytest.raises(Exception, match="is a file"):
        later.result()


def test_loading_on_meta_and_as_fake_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make().save(tmp_path / "a")

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a data file was opened")

    monkeypatch.setattr(torch, "from_file", refuse)
    meta = RewardData.load_memmap(tmp_path / "a", device="meta")
    with FakeTensorMode():
        fake = RewardData.load_memmap(tmp_path / "a")
    assert meta.input_ids.is_meta
    assert isinstance(fake.input_ids, FakeTensor)
    for shell in (meta, fake):
        assert shell.batch_size == torch.Size([3])
        assert shell.input_ids.shape == (3, 4)
        assert shell.attention_mask.dtype == torch.bool
        assert shell.rewards is None
        assert shell.check() is shell
    with pytest.raises(AssertionError, match="a data file was opened"):
        RewardData.load_memmap(tmp_path / "a")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_loading_on_a_gpu(tmp_path: Path) -> None:
    make().save(tmp_path / "a")
    loaded = RewardData.load_memmap(tmp_path / "a", "cuda")
    assert loaded.input_ids.is_cuda
    assert_same(loaded.cpu())
    assert loaded.input_lengths.tolist() == [3, 2, 1]


def test_loading_into_another_object(tmp_path: Path) -> None:
    make().save(tmp_path / "a")
    out = make(end_scores=torch.zeros(3), rewards=torch.ones(3))
    assert RewardData.load_memmap(tmp_path / "a", out=out) is out
    assert_same(out)
    for method in ("load_", "load_memmap_"):
        data = make(end_scores=torch.zeros(3), rewards=torch.ones(3))
        assert getattr(data, method)(tmp_path / "a") is data
        assert_same(data)
        data.end_scores[0] = 3.5
        assert RewardData.load(tmp_path / "a").end_scores[0] == 3.5
        data.end_scores[0] = 0.5


def test_the_example_of_memmap_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [example] = doctest.DocTestFinder().find(RewardData.memmap_like, "memmap_like", globs={})
    assert len(example.examples) == 8
    assert doctest.DocTestRunner().run(example).failed == 0
    loaded = RewardData.load_memmap(tmp_path / "rows")
    assert loaded[7].input_ids.tolist() == list(range(8))
    assert loaded.end_scores.sum() == 0.5
    assert loaded.input_lengths.sum() == 5


def test_memmap_like_of_shapes_alone(tmp_path: Path) -> None:
    shell = make(device="meta").memmap_like(tmp_path / "shell")
    assert shell.input_ids.tolist() == [[0] * 4] * 3
    assert shell.device == torch.device("cpu")

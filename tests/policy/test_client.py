"""The driver's handle: what it rejects before a worker starts, and what it adds to the results of training."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch

from rlframework import build_parts, create_manager, load_config
from rlframework.algorithms.losses import NLLLoss
from rlframework.base.errors import DataError, NotSupported
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.plugins.types import Capability, PolicyWorkerRecord
from rlframework.policy.checkpoint_io import CheckpointIO
from rlframework.policy.client import Policy


@pytest.fixture
def config(tmp_path):
    return load_config(
        {
            "policy": {"model_name": "m"},
            "algorithm": {"name": "grpo"},
            "environment": {"name": "addition"},
            "output_dir": str(tmp_path / "run"),
        }
    )


def manager_of_a_backend_with(*declared):
    record = PolicyWorkerRecord("thin", "nowhere:Worker", 1, capabilities=frozenset(declared))
    return SimpleNamespace(select=lambda kind, name: SimpleNamespace(record=record))


def test_a_reference_model_needs_a_backend_that_declares_it(config):
    manager = manager_of_a_backend_with(Capability.EMBEDDED_GENERATION)
    with pytest.raises(NotSupported, match="'thin' does not declare reference_model"):
        Policy(config, None, manager, init_reference_model=True)


def test_a_run_needs_a_backend_that_generates(config):
    manager = manager_of_a_backend_with(Capability.REFERENCE_MODEL)
    with (
        pytest.raises(NotSupported, match="'thin' does not declare embedded_generation"),
        build_parts(config, manager=manager),
    ):
        pass


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_flops_are_those_of_all_workers_rows_in_the_loss(tmp_path, tiny_llama, workers):
    config = load_config(
        {
            "policy": {"model_name": str(tiny_llama), "train_global_batch_size": 4},
            "algorithm": {"name": "sft"},
            "environment": {"name": "addition"},
            "worker_group": {"name": "inline" if workers == 1 else "processes", "num_workers": workers},
            "output_dir": str(tmp_path / "run"),
        }
    )
    lengths = torch.tensor([5, 9, 7, 12])
    inside = torch.arange(12) < lengths[:, None]
    rows = BatchedDataDict(
        {
            "input_ids": torch.full((4, 12), 3) * inside,
            "input_lengths": lengths,
            "token_mask": (inside & (torch.arange(12) >= 3)).float(),
            "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        }
    )
    tokenizer = load_tokenizer(str(tiny_llama))
    with Policy(config, tokenizer, create_manager()) as policy:
        trained, evaluated = policy.train(rows, NLLLoss()), policy.train(rows, NLLLoss(), eval_mode=True)
    # two layers of 2 x 32 x 32 (queries, output) + 2 x 32 x 16 (keys, values) + 3 x 32 x 128; 26 tokens, 17 positions
    # in the loss; attention 2 layers x 2 x 4 heads x (8 + 8) for (5^2 + 9^2 + 12^2) / 2 pairs
    forward = 2 * 30_720 * 26 + 2 * 32 * len(tokenizer) * 17 + 2 * 2 * 64 * 125
    assert (trained["flops"], evaluated["flops"]) == (3 * forward, forward)
    assert trained["times"]["train"] > 0


def test_a_checkpoint_that_is_not_there_is_an_error_before_workers_are_called(tmp_path):
    """An error in a worker would end all of them, and with them the weights."""
    for name in ("model", "optimizer", "export"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    (tmp_path / "optimizer/training.json").touch()
    (tmp_path / "export/config.json").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "run.json").touch()
    policy = object.__new__(Policy)
    with pytest.raises(DataError, match=r"^weights_path: there is no folder \S+typo$"):
        policy.load_checkpoint(str(tmp_path / "typo"))
    with pytest.raises(DataError, match=r"^optimizer_path: there is no folder \S+typo$"):
        policy.load_checkpoint(str(tmp_path / "model"), str(tmp_path / "typo"))
    with pytest.raises(DataError, match=r"is the checkpoint of a run; give its folders model and optimizer$"):
        policy.load_checkpoint(str(tmp_path))
    with pytest.raises(
        DataError, match=r"^optimizer_path: \S+export is a model, such as an export: it has no training"
    ):
        policy.load_checkpoint(str(tmp_path / "model"), str(tmp_path / "export"))
    with pytest.raises(DataError, match=r"^weights_path: \S+optimizer is the optimizer's folder of a checkpoint"):
        policy.load_checkpoint(str(tmp_path / "optimizer"))
    with pytest.raises(DataError, match=r"^weights_path: \S+empty has no weights; give a folder"):
        policy.load_checkpoint(str(tmp_path / "empty"))


def test_the_files_of_an_export_are_those_of_the_model_that_was_loaded(tmp_path, tiny_llama):
    source = shutil.copytree(tiny_llama, tmp_path / "source")
    config = load_config(
        {
            "policy": {"model_name": str(source)},
            "algorithm": {"name": "sft"},
            "environment": {"name": "addition"},
            "output_dir": str(tmp_path / "run"),
        }
    )
    with Policy(config, load_tokenizer(str(source)), create_manager()) as policy:
        policy.save_pretrained(str(tmp_path / "before"))
        shutil.rmtree(source)
        policy.save_pretrained(str(tmp_path / "after"))
    before, after = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("before", "after")
    )
    assert before == after
    assert "config.json" in before


def interrupted(*arguments):
    raise KeyboardInterrupt


def test_folders_of_different_saves_are_not_loaded_together(tmp_path, tiny_llama, monkeypatch):
    """An interrupted save leaves both folders of the save before; what a killed one leaves is found, and removed."""
    config = load_config(
        {
            "policy": {"model_name": str(tiny_llama)},
            "algorithm": {"name": "sft"},
            "environment": {"name": "addition"},
            "output_dir": str(tmp_path / "run"),
        }
    )
    paths = str(tmp_path / "model"), str(tmp_path / "optimizer")
    with Policy(config, load_tokenizer(str(tiny_llama)), create_manager()) as policy:
        policy.save_checkpoint(*paths)
        policy.load_checkpoint(*paths)
        left = tmp_path / ".optimizer.0123456789ab.tmp"
        another = tmp_path / ".other.0123456789ab.tmp"
        left.mkdir()
        another.mkdir()
        policy.save_checkpoint(paths[0], None)  # as far as an interrupted save came
        with pytest.raises(
            DataError,
            match=r"model and \S+optimizer are of different saves \(save\.json differs\): one was interrupted",
        ):
            policy.load_checkpoint(*paths)
        policy.load_checkpoint(paths[0])
        policy.save_checkpoint(*paths)
        policy.load_checkpoint(*paths)
        assert (left.exists(), another.exists()) == (False, True)
        saved = {path: path.read_bytes() for path in tmp_path.glob("*/save.json")}
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointIO, "_write_training", interrupted)
            with pytest.raises(KeyboardInterrupt):
                policy.save_checkpoint(*paths)
        assert {path: path.read_bytes() for path in tmp_path.glob("*/save.json")} == saved  # both of the save before
        assert sorted(path.name for path in tmp_path.iterdir()) == [another.name, "model", "optimizer"]
        policy.load_checkpoint(*paths)


def test_paths_are_of_the_program_and_not_of_the_workers(tmp_path, monkeypatch):
    """Workers keep the directory that they were started in; a notebook may change its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/model.safetensors").touch()
    policy, calls = object.__new__(Policy), []
    policy._calls = SimpleNamespace(on_all=lambda method, **paths: calls.append(paths))
    policy.save_pretrained("model")
    policy.save_checkpoint("weights", "optimizer", reference_path="reference")
    policy.load_checkpoint("kept")
    paths = [path for call in calls for name, path in call.items() if name.endswith("path")]
    names = ["model", "weights", "optimizer", "reference", "kept"]
    assert paths == [str(tmp_path / name) for name in names]

"""Loading weights from files directly into shards; a single process in bfloat16 is sharded over one rank."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlframework.base.errors import DataError
from rlframework.config.policy import PolicyConfig
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.models import loading
from rlframework.models.file_weights import FileLayout
from rlframework.models.loading import empty_model, load_config, load_model
from rlframework.workers import process_groups
from rlframework_conformance import cases
from rlframework_dtensor import model_builder
from rlframework_dtensor.config import DTensorConfig
from rlframework_dtensor.mesh import Sizes
from rlframework_dtensor.model_builder import build_model
from rlframework_dtensor.shards import gather_full


@pytest.fixture
def loaded():
    """`loaded(path)`: the whole weights of the model that a worker loads from `path`."""
    joined = []

    def load(path):
        config = PolicyConfig(model_name=str(path), precision="bfloat16")
        built = build_model(
            config, DTensorConfig(), WorkerContext(), Sizes(1, 1, 1, 1), cases.tokenizer(), torch.device("cpu")
        )
        joined.append(built)
        return {name: gather_full(weight.detach()) for name, weight in built.model.named_parameters()}

    yield load
    for _ in joined:
        process_groups.leave()


@pytest.fixture
def model(tmp_path):
    """`model(name, change)`: a directory with the suite's model after `change(weights)`, and these weights."""

    def make(name, change=lambda weights: weights):
        path = cases.model(name, tmp_path)
        weights = change(load_file(path / "model.safetensors"))
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return path, weights

    return make


@pytest.mark.slow
def test_files_in_half_precision_are_read_as_fp32(loaded, model, monkeypatch):
    path, saved = model("untied", lambda weights: {name: value.bfloat16() for name, value in weights.items()})
    monkeypatch.setattr(loading, "load_model", None)  # no whole model is made
    found = loaded(path)
    assert found.keys() == saved.keys()
    for name, weight in found.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, saved[name].float()), name


@pytest.mark.slow
def test_files_may_omit_the_prefix_of_the_base_model(loaded, model, monkeypatch):
    path, saved = model(
        "learned_positions", lambda weights: {name.removeprefix("transformer."): w for name, w in weights.items()}
    )
    monkeypatch.setattr(loading, "load_model", None)
    for name, weight in loaded(path).items():
        assert torch.equal(weight, saved[name.removeprefix("transformer.")]), name


@pytest.mark.slow
def test_files_may_store_a_tied_embedding_under_the_heads_name(loaded, model, monkeypatch):
    old, new = "model.embed_tokens.weight", "lm_head.weight"
    path, saved = model("tied", lambda weights: {new if name == old else name: w for name, w in weights.items()})
    monkeypatch.setattr(loading, "load_model", None)
    found = loaded(path)
    assert torch.equal(found[old], saved[new])
    assert new not in found


@pytest.mark.slow
def test_a_file_that_lacks_a_weight_is_rejected(model):
    path, _ = model("untied", lambda weights: {name: w for name, w in weights.items() if "layers.1.mlp" not in name})
    config = PolicyConfig(model_name=str(path))
    with pytest.raises(DataError, match=r"it lacks \['model\.layers\.1\.mlp\.down_proj\.weight'"):
        load_model(config, None)


@pytest.mark.slow
def test_rotary_frequencies_are_those_of_the_model(model):
    """They are buffers that no file contains."""
    path, _ = model("untied")
    config = PolicyConfig(model_name=str(path))
    empty = empty_model(config, load_config(config), None)
    assert all(parameter.is_meta for parameter in empty.parameters())
    model_builder.load_pretrained_weights(empty, FileLayout.of(empty), config, None, torch.device("cpu"))
    right = load_model(config, None)
    for name, buffer in right.named_buffers():
        assert torch.equal(dict(empty.named_buffers())[name], buffer), name
    for name, parameter in right.named_parameters():
        assert torch.equal(dict(empty.named_parameters())[name], parameter), name

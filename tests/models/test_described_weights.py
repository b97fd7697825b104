"""Weights that are not those of the model in `config.json`: one error that names the weight and the field."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlframework.base.errors import DataError
from rlframework.config.policy import PolicyConfig
from rlframework.models.file_weights import FileLayout
from rlframework.models.loading import empty_model, load_config, load_model, pretrained_weights, require_vocabulary
from rlframework_conformance import cases

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def model(originals: Path, tmp_path: Path) -> Any:
    """`model(name, change, **config)`: a copy with these fields of `config.json`, after `change(weights)`."""

    def make(name: str, change: Any = None, **fields: Any) -> PolicyConfig:
        folder = tmp_path / "model"
        shutil.copytree(cases.model(name, originals), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))
        if change is not None:
            weights = load_file(folder / "model.safetensors")
            change(weights)
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return PolicyConfig(model_name=str(folder))

    return make


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 0}, "config.json is invalid"),
        ({"num_attention_heads": 5}, "is not a multiple of the number of attention heads"),
        ({"num_key_value_heads": 0}, "config.json is invalid"),
        ({"hidden_size": 64}, "hidden_size=64"),
        ({"vocab_size": 70}, r"model\.embed_tokens\.weight with shape .*vocab_size=70"),
        ({"vocab_size": 10**12}, r"vocab_size=1000000000000"),
        ({"intermediate_size": 8}, "intermediate_size=8"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\..* which its config\.json does not describe .*layers=1"),
        ({"num_hidden_layers": 3}, r"lacks \['model\.layers\.2\..*num_hidden_layers=3"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"hidden_act": "nothing"}, "config.json is invalid"),
        ({"pad_token_id": 10**6}, "config.json is invalid"),
    ],
)
def test_a_configuration_of_another_model(model: Any, fields: dict[str, Any], message: str) -> None:
    config = model("untied", **fields)
    with pytest.raises(DataError, match=message) as caught:
        load_model(config, None)
    assert "model" in str(caught.value)


def put(name: str, index: int, value: float) -> Any:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[name].view(-1)[index] = value

    return change


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(model: Any, value: float) -> None:
    config = model("tied", put(EMBEDDING, 7, value))
    with pytest.raises(DataError, match=rf"{EMBEDDING} of .* not finite"):
        load_model(config, None)
    model_config = load_config(config)
    empty = empty_model(config, model_config, None)
    weights = pretrained_weights(FileLayout.of(empty), empty, config, None)
    with pytest.raises(DataError, match=rf"{EMBEDDING} of .* not finite"):
        weights[EMBEDDING]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.update(other=torch.ones(1)), r"has \['other'\], which its config\.json does not"),
        (lambda weights: weights.update({HEAD: weights[EMBEDDING] + 1}), "tie_word_embeddings in it to false"),
        (lambda weights: weights.update({EMBEDDING: weights[EMBEDDING].int()}), "must be of floating point"),
    ],
)
def test_files_of_another_model(model: Any, change: Any, message: str) -> None:
    config = model("tied", change)
    with pytest.raises(DataError, match=message):
        load_config(config)


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights.update({HEAD: weights[EMBEDDING].clone()}),
        lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    ],
)
def test_what_older_releases_save_too_is_no_mistake(model: Any, change: Any) -> None:
    load_model(model("tied", change), None)


def test_a_tokenizer_with_an_id_beyond_the_vocabulary() -> None:
    """It may have fewer tokens than the model has embeddings."""
    tokenizer = cases.tokenizer()
    require_vocabulary(len(tokenizer), tokenizer)
    with pytest.raises(DataError, match=r"check policy\.tokenizer_name"):
        require_vocabulary(len(tokenizer) - 1, tokenizer)

    class Sparse:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 99}

        def __len__(self) -> int:
            return 2

    with pytest.raises(DataError, match="has a token with the id 99"):
        require_vocabulary(50, Sparse())


def loads(config: PolicyConfig) -> Any:
    """The head's weight, read by both ways to load a model; both give the same."""
    whole = load_model(config, None)
    model = empty_model(config, load_config(config), None)
    layout = FileLayout.of(model)
    by_slices = pretrained_weights(layout, model, config, None)
    assert by_slices.keys() == layout.weights.keys()
    assert torch.equal(by_slices["score.weight"], whole.score.weight)
    return whole.score.weight


@pytest.mark.slow
@pytest.mark.parametrize("head", ["score", "value"])
@pytest.mark.parametrize("name", ["untied", "tied", "learned_positions"])
def test_a_new_head_on_a_language_model_is_zeros(model, name, head):
    config = model(name)
    weight = loads(config.model_copy(update={"head": head, "head_init": "zeros"}))
    assert weight.shape == (1, 32)
    assert not weight.any()
    for load in (lambda wrong: load_model(wrong, None), loads):
        with pytest.raises(DataError, match=r"lacks \['score.weight'\].*set policy.head_init=zeros"):
            load(config.model_copy(update={"head": head}))


class Messages(logging.Handler):
    """Keeps what transformers logs, whose loggers do not propagate to those that pytest looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def messages() -> Iterator[Messages]:
    handler = Messages()
    logging.getLogger("transformers").addHandler(handler)
    yield handler
    logging.getLogger("transformers").removeHandler(handler)


def test_transformers_reports_missing_weights_but_not_a_new_head(model, messages):
    """Its level is as before afterwards."""
    config = model("untied").model_copy(update={"head": "score", "head_init": "zeros"})
    load_model(config, None)
    assert not messages.texts
    with pytest.raises(DataError, match=r"lacks \['score.weight'\]"):
        load_model(config.model_copy(update={"head_init": "checkpoint"}), None)
    assert "LOAD REPORT" in "".join(messages.texts)


def test_a_new_head_does_not_replace_one(model):
    config = model("reward").model_copy(update={"head": "score", "head_init": "zeros"})
    with pytest.raises(DataError, match=r"policy.head_init=zeros is for models without score.weight"):
        load_model(config, None)


def test_beside_a_new_head_no_other_weight_may_be_missing_or_unknown(model):
    def change(weights: dict[str, Any]) -> None:
        weights["other.weight"] = torch.zeros(2)

    config = model("untied", change).model_copy(update={"head": "value", "head_init": "zeros"})
    with pytest.raises(DataError, match=r"has \['other\.weight'\]"):
        load_model(config, None)

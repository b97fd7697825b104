"""The weights of a model in files, compared with those that transformers itself writes."""

from __future__ import annotations

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CamembertConfig, GPT2Config, MixtralConfig, Qwen3MoeConfig

from rlframework.models.file_weights import FileLayout, FileWeight, by_file_names, gathered, named_tensors


def file_shapes(folder):
    """Name to shape of all weights in the safetensors files of `folder`."""
    shapes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    return shapes


def saved_tensors(model):
    return by_file_names(model, named_tensors(model))


def test_a_tied_head_appears_once_as_the_embedding(tiny_llama):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert model.config.tie_word_embeddings
    assert {name: tuple(tensor.shape) for name, tensor in saved_tensors(model).items()} == file_shapes(tiny_llama)


def test_buffers_that_are_not_saved_are_omitted(tmp_path):
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=16))
    model.register_buffer("temporary", torch.zeros(1), persistent=False)
    model.save_pretrained(tmp_path)
    assert {name: tuple(tensor.shape) for name, tensor in saved_tensors(model).items()} == file_shapes(tmp_path)


def test_experts_have_the_names_of_files_and_are_views(tmp_path):
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads, num_local_experts=3))
    model.save_pretrained(tmp_path)
    tensors, saved = saved_tensors(model), load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == saved.keys()
    assert all(torch.equal(tensors[name], weight) for name, weight in saved.items())
    assert not any(tensor.requires_grad for tensor in tensors.values())
    tensors["model.layers.0.block_sparse_moe.experts.1.w2.weight"].fill_(7.0)
    inside = model.get_submodule("model.layers.0.mlp.experts").down_proj
    assert (inside[1] == 7.0).all()
    assert not (inside[[0, 2]] == 7.0).any()


def test_the_layout_says_where_each_weight_of_files_is():
    """In the second half of the second expert, for example: the first of its 6 rows of 8 has 12 + 6 before it."""
    sizes = {"vocab_size": 11, "hidden_size": 8, "moe_intermediate_size": 6, "num_hidden_layers": 1, "num_experts": 3}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, num_attention_heads=2, num_experts_per_tok=2))
    layout = FileLayout.of(model)
    source = "model.layers.0.mlp.experts.gate_up_proj"
    up = layout.weights["model.layers.0.mlp.experts.1.up_proj.weight"]
    assert up == FileWeight(up.name, source, (6, 8), (3, 12, 8), expert=1, start=6)
    assert up.flat_start == 18 * 8
    assert len(layout.by_source[source]) == 6
    assert layout.other_names == {}


def test_a_tied_weight_has_the_name_that_transformers_keeps(tmp_path):
    """In memory an encoder's head comes first, and files have the embedding."""
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(CamembertConfig(**sizes, num_attention_heads=2, is_decoder=True))
    model.save_pretrained(tmp_path)
    layout = FileLayout.of(model)
    weights = {name: part.shape for name, part in layout.weights.items()}
    assert weights == file_shapes(tmp_path)
    assert layout.weights["roberta.embeddings.word_embeddings.weight"].source == "lm_head.decoder.weight"
    assert layout.other_names["roberta.embeddings.word_embeddings.weight"] == ["lm_head.decoder.weight"]


def test_a_tensor_is_gathered_once_for_names_that_follow():
    names = ["e.0", "e.1", "w", "e.0"]
    weights = {f"e.{n}": FileWeight(f"e.{n}", "e", (2, 2), (2, 2, 2), n) for n in (0, 1)}
    weights["w"] = FileWeight.entire("w", (2,))
    tensors, asked = {"e": torch.arange(8.0).view(2, 2, 2), "w": torch.ones(2)}, []

    def gather(source):
        asked.append(source)
        return tensors[source]

    found = [(name, weight.tolist()) for name, weight in gathered(names, weights, gather)]
    first, second = [[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0, 7.0]]
    assert found == [("e.0", first), ("e.1", second), ("w", [1.0, 1.0]), ("e.0", first)]
    assert asked == ["e", "w", "e"]

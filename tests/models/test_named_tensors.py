"""The named tensors of a model, compared with the files that transformers itself writes."""

from __future__ import annotations

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3MoeConfig

from rlframework.models.named_tensors import by_file_names, named_tensors


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
    config = Qwen3MoeConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        moe_intermediate_size=6,
        num_experts=3,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    tensors = saved_tensors(model)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == file_shapes(tmp_path)
    assert not any(tensor.requires_grad for tensor in tensors.values())
    tensors["model.layers.0.mlp.experts.1.down_proj.weight"].fill_(7.0)
    inside = model.get_submodule("model.layers.0.mlp.experts").down_proj
    assert (inside[1] == 7.0).all()
    assert not (inside[[0, 2]] == 7.0).any()

"""Sizes of a model, and what its layers save for the backward, against counts of real models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from live_memory import LiveMemory
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from rlframework.config.policy import LoraConfig, ParallelismConfig
from rlframework.models import attention
from rlframework.models.activation_checkpointing import checkpoint_activations
from rlframework.models.loading import auto_class
from rlframework_tools.estimates.model_size import BlockSize, LayerShape, ModelSize, model_size

DTYPES = {4: torch.float32, 2: torch.bfloat16}


def test_parameters_are_counted_without_loading(tiny_llama: Path, run_config):
    before = torch.get_rng_state()
    size = model_size(run_config("sft").policy)
    # 2 layers of 32: query and output 32x32, key and value 32x16, three of 32x128, two norms; a norm; a tied head
    block = BlockSize(matrices=2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 128, vectors=2 * 32)
    assert size.blocks == (block, block)
    assert (size.embedding, size.head, size.rest) == (size.vocabulary * 32, 0, 32)
    assert size.parameters == size.trained == size.vocabulary * 32 + 2 * block.parameters + 32
    assert size.layer == LayerShape(hidden=32, query=32, key_value=16, heads=4, intermediate=128)
    assert torch.equal(torch.get_rng_state(), before)


def test_only_adapters_are_trained_with_lora(run_config):
    lora = LoraConfig(rank=4, target_modules=("q_proj", "k_proj"))
    size = model_size(run_config("sft").policy.model_copy(update={"lora": lora}))
    assert size.trained == 2 * (4 * (32 + 32) + 4 * (32 + 16))
    size = model_size(run_config("sft", "policy.lora={rank: 4, target_modules: all-linear}").policy)
    # the layers of 32x32, 32x16 and 32x128 that the test above counts
    assert size.trained == 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 128))


SHAPES = {
    "qwen3": Qwen3Config(
        hidden_size=1024, num_hidden_layers=3, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, vocab_size=512,
    ),
    "llama": LlamaConfig(
        hidden_size=2048, num_hidden_layers=3, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=8192, vocab_size=512,
    ),
    "qwen3_moe": Qwen3MoeConfig(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        moe_intermediate_size=192, intermediate_size=1024, num_experts=16, num_experts_per_tok=4, vocab_size=512,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("width", [4, 2])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_activations_are_what_a_model_saves(name, width, checkpointing, run_config, tmp_path):
    # fake tensors have no memory, and their sizes are those of real ones
    saved, most = _counted(SHAPES[name], DTYPES[width], checkpointing, 2048, fake=True)
    shape = _shape(SHAPES[name], run_config, tmp_path)
    layer, hidden = shape.saved(width), SHAPES[name].hidden_size
    kept = width * hidden if checkpointing else layer
    assert saved == pytest.approx(kept, rel=0.01)
    recomputed = layer if checkpointing else 0
    expected = 3 * kept + recomputed + shape.backward(width, checkpointed=checkpointing)
    assert most == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("width", [4, 2])
def test_activations_of_experts_are_those_of_the_rows_that_are_routed_to_them(width, run_config, tmp_path):
    # routing depends on values, so these tensors are real
    saved, most = _counted(SHAPES["qwen3_moe"], DTYPES[width], False, 256, fake=False)
    shape = _shape(SHAPES["qwen3_moe"], run_config, tmp_path)
    assert (shape.experts, shape.top_k, shape.intermediate) == (16, 4, 192)
    assert saved == pytest.approx(shape.saved(width), rel=0.01)
    assert most == pytest.approx(3 * shape.saved(width) + shape.backward(width), rel=0.15)


def _shape(config, run_config, folder) -> LayerShape:
    config.save_pretrained(folder)
    return model_size(run_config("sft", f"policy.model_name={folder}").policy).layer


def _counted(config, dtype, checkpointing, tokens, *, fake) -> tuple[float, float]:
    """Bytes per token that a layer keeps for the backward, and that exist at most in forward and backward.

    Measured at two lengths, so that what does not depend on the tokens, as gradients of weights, does not count.
    """
    attention.register()
    config._attn_implementation = attention.ATTENTION
    short, long = (_run(config, dtype, checkpointing, length, fake) for length in (tokens, 2 * tokens))
    saved, most = ((b - a) / tokens for a, b in zip(short, long, strict=True))
    return saved, most


def _run(config, dtype, checkpointing, tokens, fake) -> tuple[int, int]:
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.random.fork_rng():
        model = auto_class(config).from_config(config, dtype=dtype).train()
        if checkpointing:
            checkpoint_activations(model, "full")
        inputs = torch.zeros(1, tokens, config.hidden_size, dtype=dtype, requires_grad=True)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        position_ids, layout = torch.arange(tokens)[None], attention.PaddedRows()
        known = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers(), inputs]
        after_layers = []
        with LiveMemory(known) as memory:
            start = memory.live
            for layer in model.model.layers:
                layer.register_forward_hook(lambda *_: after_layers.append(memory.live))
            output = model.model(
                inputs_embeds=inputs, position_ids=position_ids, use_cache=False, row_layout=layout
            ).last_hidden_state
            output.backward(torch.zeros_like(output))
        return after_layers[2] - after_layers[1], memory.peak - start


# -- parts of a model -------------------------------------------------------------------------------------------------

DENSE = ModelSize(
    blocks=(BlockSize(80, 4),) * 4, embedding=100, head=60, rest=6, trained=0, vocabulary=10,
    layer=LayerShape(4, 4, 2, 2, 8),
)  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "stage", "others", "unit"),
    [
        ({}, 0, 4 * 84 + 100 + 60 + 6, 100),
        ({"tensor": 2}, 0, 4 * (40 + 4) + 50 + 30 + 6, 50),  # norms are replicated
        ({"pipeline": 2}, 0, 2 * 84 + 100, 100),  # the embedding, not the head
        ({"pipeline": 2}, 1, 2 * 84 + 60 + 6, 84),  # the head and the final norm
    ],
)
def test_the_part_of_a_worker(axes, stage, others, unit):
    part = DENSE.part(ParallelismConfig(**axes), stage, splits_ends=True)
    assert (part.others, part.experts, part.unit) == (others, 0, unit)


def test_a_tied_head_is_a_copy_on_the_last_stage_of_a_pipeline():
    tied = ModelSize(DENSE.blocks, 100, 0, 6, 0, DENSE.layer, 10)
    assert tied.part(ParallelismConfig(pipeline=2), 1, splits_ends=True).others == 2 * 84 + 100 + 6
    assert tied.part(ParallelismConfig(), 0, splits_ends=True).tied_end == 100


def test_experts_are_divided_by_expert_parallelism():
    sparse = ModelSize((BlockSize(80, 4, 640),) * 2, 100, 60, 6, 0, DENSE.layer, 10)
    part = sparse.part(ParallelismConfig(expert=4), 0, splits_ends=True)
    assert (part.experts, part.others, part.unit) == (2 * 160, 2 * 84 + 166, 84 + 160)

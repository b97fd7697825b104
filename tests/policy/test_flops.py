"""FLOPs of a model: by hand, and against torch's count of the operations that a model runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlframework.policy.flops import ModelFlops

SIZES = {"hidden_size": 8, "num_attention_heads": 2, "head_dim": 4, "num_hidden_layers": 2, "vocab_size": 10}
LAYER = {
    "self_attn.q_proj": (8, 8),
    "self_attn.k_proj": (4, 8),
    "self_attn.v_proj": (4, 8),
    "self_attn.o_proj": (8, 8),
    "mlp.up_proj": (16, 8),
    "mlp.down_proj": (8, 16),
}  # 64 + 32 + 32 + 64 + 128 + 128 = 448
WEIGHTS = {
    "model.embed_tokens.weight": (10, 8),
    "model.norm.weight": (8,),
    **{f"model.layers.{n}.{name}.weight": shape for n in (0, 1) for name, shape in LAYER.items()},
    "model.layers.0.input_layernorm.weight": (8,),
    "model.visual.blocks.0.mlp.weight": (100, 100),
}
LENGTHS, POSITIONS = torch.tensor([3, 5]), 6.0


def sizes(weights=WEIGHTS, adapters=None, **more):
    return ModelFlops.of(weights, SimpleNamespace(**SIZES | more), adapters)


def test_a_dense_model_by_hand():
    # matrices: 2 x 896 x 8 tokens; head: 2 x 80 x 6 positions; attention: 2 layers x 2 x (2 heads x (4 + 4)) for
    # (3^2 + 5^2) / 2 pairs
    forward = 14_336 + 960 + 2 * 2 * 16 * 17
    assert sizes().forward(LENGTHS, POSITIONS) == forward
    assert sizes().training(LENGTHS, POSITIONS) == 3 * forward


def test_lora_trains_adapters_and_computes_no_gradient_of_the_rest():
    one = sizes(adapters=[(2, 8), (8, 2)])  # 32 weights
    attention, frozen, adapters = 1088, 14_336 + 960, 2 * 32 * 8
    assert one.forward(LENGTHS, POSITIONS) == frozen + adapters + attention
    assert one.training(LENGTHS, POSITIONS) == 2 * frozen + 3 * (adapters + attention)


def test_of_experts_only_those_that_a_token_is_sent_to_count():
    experts = {f"model.layers.0.mlp.experts.{n}.up_proj.weight": (16, 8) for n in range(4)}
    together = {
        "model.layers.1.moe.input_linear.weight": (4, 32, 8),
        "model.layers.1.mlp.experts.up_proj_bias": (4, 32),
    }
    shared = {"model.layers.1.mlp.shared_experts.up_proj.weight": (2, 8)}
    routed = sizes(WEIGHTS | experts | together | shared, num_experts=4, num_experts_per_tok=2)
    assert routed.layers == 896 + 4 * 128 / 2 + 4 * 256 / 2 + 16
    assert sizes(WEIGHTS | experts) is None


def test_a_window_limits_the_attention_of_its_layers():
    mixed = sizes(layer_types=["full_attention", "sliding_attention"], sliding_window=2)
    # half of 3^2 + 5^2 in one layer; in the other less what is beyond the window, half of 1^2 + 3^2
    pairs = 17 + (17 - 5)
    assert mixed.forward(LENGTHS, POSITIONS) == 14_336 + 960 + 2 * 16 * pairs
    linear = sizes(layer_types=["full_attention", "linear_attention"])
    assert linear.forward(LENGTHS, POSITIONS) == 14_336 + 960 + 2 * 16 * 17


def test_sizes_that_the_configuration_lacks_are_unknown():
    assert ModelFlops.of(WEIGHTS, SimpleNamespace(hidden_size=8, vocab_size=10), None) is None


MODELS = {
    "dense": lambda common: LlamaForCausalLM(LlamaConfig(**common, intermediate_size=48)),
    "experts": lambda common: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**common, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, head_dim=16)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_torch_counts_the_same_and_all_of_the_attention(kind):
    common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = MODELS[kind](common | {"vocab_size": 50, "attn_implementation": "eager", "use_cache": False})
    model.set_experts_implementation("eager")  # torch does not count grouped products
    tokens = torch.arange(12)[None]
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    found = ModelFlops.of({name: weight.shape for name, weight in model.state_dict().items()}, model.config)
    assert found is not None
    after_the_token = 3 * 2 * found.attention * 2 * 12**2 / 2  # which the causal mask discards
    assert counter.get_total_flops() == found.training(torch.tensor([12]), 12) + after_the_token


def test_a_size_that_differs_between_layers_is_left_out():
    """transformers raises an error for it (Gemma 4), which must not end a training step."""

    class Config(SimpleNamespace):
        @property
        def head_dim(self):
            raise RuntimeError("'head_dim' is a per-layer attribute")

    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    found, expected = (ModelFlops.of(WEIGHTS, kind(**sizes)) for kind in (Config, SimpleNamespace))
    assert found == expected is not None

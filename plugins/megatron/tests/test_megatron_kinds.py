"""Each supported model type, as it is and with all its settings changed, against transformers row by row."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_kinds import KINDS, tiny_config
from forked_ranks import complaints
from transformers import AutoModelForCausalLM, PretrainedConfig

from rlframework.base.errors import NotSupported
from rlframework_megatron.architectures import ARCHITECTURES
from rlframework_megatron.settings import require_same_function

RANKS = Path(__file__).with_name("megatron_kind_ranks.py")

SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "num_experts", "num_local_experts", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "no_rope_layer_interval", "max_window_layers"),
}
"""Settings that `tiny_config` already chooses, or that only make other settings."""

NOTHING = {
    *("initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp"),
    *("attention_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout", "original_max_position_embeddings"),
    *("output_router_logits", "router_aux_loss_coef"),
}
"""Settings that change nothing in evaluation mode."""

YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 2.0, "original_max_position_embeddings": 64}
CHANGES: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "hidden_act": "gelu",
    "hidden_activation": "silu",
    "rms_norm_eps": 0.1,
    "tie_word_embeddings": None,  # the other one
    "attention_bias": None,
    "attention_out_bias": None,
    "mlp_bias": None,
    "qkv_bias": None,
    "norm_topk_prob": None,
    "use_sliding_window": True,
    "sliding_window": 3,
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_parameters": YARN,
    "query_pre_attn_scalar": 20,
    "final_logit_softcapping": 2.0,
    "attn_logit_softcapping": 1.5,
    "use_bidirectional_attention": True,
    "num_experts_per_tok": 3,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [0],
    "router_jitter_noise": 0.1,
    "swiglu_alpha": 1.2,
    "swiglu_limit": 0.5,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.4,
    "logits_scaling": 1.7,
    "no_rope_layers": [0, 1],
}
"""Other values of settings; of a boolean None means the other one."""

ROPES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
    "glm": YARN | {"partial_rotary_factor": 0.5},
    "phi3": {
        "rope_type": "longrope",
        "rope_theta": 5000.0,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 8,
    },
    "qwen2": {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 3.0},
}
OWN: dict[str, dict[str, Any]] = {
    "phi3": {"original_max_position_embeddings": 8},
    "qwen2": {"max_position_embeddings": 8},
}
"""Further settings of single types; longrope and dynamic depend on the length of a row, 8 is between those of rows."""


def switched(kind: str) -> tuple[PretrainedConfig, list[str]]:
    """A configuration with every setting changed that may be, and the settings that are rejected."""
    plain = tiny_config(KINDS[kind])
    names = {field.name for field in dataclasses.fields(plain)} - {
        one.name for one in dataclasses.fields(PretrainedConfig)
    }
    names |= {"tie_word_embeddings"}
    unchanged = names - CHANGES.keys() - SIZES - NOTHING - {"model_type"}
    assert not unchanged, f"{kind} has settings that this test does not change: {sorted(unchanged)}"
    changes, rejected = {}, []
    for name in sorted(names & CHANGES.keys()):
        value = not getattr(plain, name) if CHANGES[name] is None else CHANGES[name]
        value = ROPES.get(kind, value) if name == "rope_parameters" else value
        changed = built(plain, {name: value})
        try:
            require_same_function(changed)
        except NotSupported:
            rejected.append(name)
            continue
        changes[name] = value
    return built(plain, changes | OWN.get(kind, {})), rejected


def built(plain: PretrainedConfig, changes: dict[str, Any]) -> PretrainedConfig:
    keys = {key: value for key, value in plain.to_dict().items() if key not in {"rope_scaling", "rope_theta"}}
    if "no_rope_layers" not in changes:
        keys.pop("no_rope_layers", None)
    return type(plain)(**copy.deepcopy({**keys, **changes}))  # they change dictionaries that they are given


@torch.no_grad()
def save(config: PretrainedConfig, folder: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 1.0 / math.sqrt(parameter.shape[-1]))
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Models of all types, plain and switched."""
    path = tmp_path_factory.mktemp("models")
    for kind in ARCHITECTURES:
        save(tiny_config(KINDS[kind]), path / kind)
        save(switched(kind)[0], path / f"{kind}-switched")
    return path


def compare(world: int, folder: Path, words: list[str]) -> None:
    found = complaints(RANKS, str(world), str(folder), *words)
    assert found == {word: {} for word in words}


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_only_these_settings_are_rejected(kind):
    expected = {"gemma": ["use_bidirectional_attention"], "gemma2": ["use_bidirectional_attention"]}
    expected["gemma3_text"] = ["use_bidirectional_attention"]
    assert switched(kind)[1] == expected.get(kind, [])


@pytest.mark.thorough
@pytest.mark.slow
def test_each_type_computes_what_transformers_does(folder):
    compare(1, folder, [f"{kind}:data=1:packed" for kind in ARCHITECTURES])


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["dynamic", "packed"])
def test_each_type_computes_what_transformers_does_whatever_its_settings(folder, mode):
    compare(1, folder, [f"{kind}-switched:data=1:{mode}" for kind in ARCHITECTURES])


SPLIT = {
    "pipeline=2": ["gemma3_text", "gpt_oss", "olmo2", "qwen2_moe", "smollm3"],
    "tensor=2,sequence": sorted(ARCHITECTURES.keys() - {"gpt_oss"}),
    "tensor=2": ["gemma2", "granite", "olmo3", "phi3"],
    "context=2": ["gemma2", "gemma3_text", "gpt_oss", "mistral", "smollm3"],
}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("layout", SPLIT)
def test_types_that_are_split_compute_what_transformers_does(folder, layout):
    plain = {"qwen2", "phi3"} if layout == "context=2" else set()
    words = [f"{kind}{'' if kind in plain else '-switched'}:{layout}:packed" for kind in SPLIT[layout]]
    compare(2, folder, words)

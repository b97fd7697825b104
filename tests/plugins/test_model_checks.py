"""Checks of a configuration that several backends share."""

from __future__ import annotations

import json

import pytest

from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import AlgorithmConfig, EnvironmentConfig, RunConfig
from rlframework.plugins.model_checks import head_size, indivisible, lora_problems, model_config, token_cache_bytes

LLAMA = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("model", "tensor", "said"),
    [
        (LLAMA, 2, None),
        (LLAMA, 4, "the model has 2 key-value heads, not divisible by policy.parallelism.tensor=4"),
        (LLAMA | {"intermediate_size": 63}, 2, "the model has 63 units of the MLP"),
        (LLAMA | {"num_attention_heads": 5}, 2, "the model has 5 attention heads"),
        ({}, 3, None),
    ],
)
def test_what_tensor_parallelism_does_not_divide(model, tensor, said):
    found = indivisible(model, tensor)
    assert (found is None) == (said is None)
    assert said is None or (found is not None and found.startswith(said))


def test_the_cache_of_a_token_has_keys_and_values_of_each_head_and_layer():
    model = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    assert (head_size(model), token_cache_bytes(model, 4)) == (8, 2 * 3 * 2 * 8 * 4)
    assert token_cache_bytes({**model, "head_dim": 5, "num_key_value_heads": None}, 2) == 2 * 3 * 4 * 5 * 2
    assert (head_size({}), token_cache_bytes({}, 4)) == (0, 0)


@pytest.mark.parametrize(("text", "found"), [(json.dumps(LLAMA), LLAMA), ("[]", {}), ("{", {}), (None, {})])
def test_the_configuration_of_a_model_directory(tmp_path, text, found):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert model_config(str(tmp_path)) == found


@pytest.mark.parametrize(
    ("policy", "key"),
    [
        ({}, None),
        ({"lora": {}}, None),
        ({"lora": {"target_modules": []}}, "policy.lora.target_modules"),
        ({"lora": {}, "head": "score"}, "policy.lora"),
        ({"lora": {}, "head": "value"}, "policy.lora"),
    ],
)
def test_what_adapters_do_not_go_with(policy, key):
    config = RunConfig(
        algorithm=AlgorithmConfig(name="a"),
        policy=PolicyConfig.model_validate({"model_name": "m", **policy}),
        environment=EnvironmentConfig(name="e"),
    )
    assert [problem.key for problem in lora_problems(config)] == [key] * (key is not None)

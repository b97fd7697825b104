"""Engines that read the base model themselves and merge the received adapters."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from rlframework.errors import DataError, UserError
from rlframework.generation.adapted_model import AdaptedModel

CPU = torch.device("cpu")
LAYER = "model.layers.0.self_attn.q_proj"


def adapters(model_path, seed, rank=2):
    generator = torch.Generator().manual_seed(seed)
    rows, columns = load_file(model_path / "model.safetensors")[f"{LAYER}.weight"].shape
    matrices = {"lora_A": (rank, columns), "lora_B": (rows, rank)}
    return {f"{LAYER}.{name}.weight": torch.randn(shape, generator=generator) for name, shape in matrices.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_refit_starts_from_the_base_and_not_from_the_last(tiny_llama, dtype):
    engine = AdaptedModel(str(tiny_llama), CPU, dtype)
    base = load_file(tiny_llama / "model.safetensors")
    for seed in range(3):
        given = adapters(tiny_llama, seed)
        weights = engine.load(given.items()).state_dict()
        added = given[f"{LAYER}.lora_B.weight"] @ given[f"{LAYER}.lora_A.weight"]
        right = (base[f"{LAYER}.weight"].float() + added).to(dtype)
        torch.testing.assert_close(
            weights[f"{LAYER}.weight"], right, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=0
        )
        for name, weight in base.items():
            assert name == f"{LAYER}.weight" or torch.equal(weights[name], weight.to(dtype)), name


def test_a_layer_that_the_base_lacks_is_rejected(tiny_llama):
    given = {name.replace("q_proj", "w_proj"): matrix for name, matrix in adapters(tiny_llama, 0).items()}
    with pytest.raises(UserError, match=r"w_proj.*does not have"):
        AdaptedModel(str(tiny_llama), CPU, torch.float32).load(given.items())


def test_an_unreadable_base_is_reported_with_the_key_to_change(tiny_llama, tmp_path):
    with pytest.raises(DataError, match=r"policy\.lora\.refit=adapters.*set policy\.lora\.refit to merged"):
        AdaptedModel(str(tmp_path / "nowhere"), CPU, torch.float32).load(adapters(tiny_llama, 0).items())

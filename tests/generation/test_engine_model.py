"""Weights loaded by name (tied heads, repeated loads, other names in files, rejections), and adapters merged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from batched_engine import Batches
from torch import Tensor

from rlframework.base.errors import DataError, EngineNotReady, RefitError, UserError
from rlframework.generation.engine_model import EngineModel
from rlframework.huggingface.model_directories import make_llama, quiet_transformers
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.policy.lora_math import A, B

LAYER = "model.layers.0.self_attn.q_proj"


def make_engine(path: str, tokenizer: Any, precision: str = "float32") -> Batches:
    return Batches.of(path, tokenizer, precision, max_new_tokens=12, temperature=0.0)


def saved(path: str | Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(path) / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_loaded_weights_generate_as_the_attached_model(
    tmp_path: Path, batch: Any, completions: Any, plain_greedy: Any, tied: bool
) -> None:
    """Twice with different weights, which the caller may change afterwards: the first builds, the second copies."""
    from transformers import AutoModelForCausalLM

    tokenizer = character_tokenizer("0123456789")
    paths = [
        make_llama(tmp_path / str(s), tokenizer, hidden=32, layers=2, init_std=0.4, tied=tied, seed=s) for s in (0, 1)
    ]
    engine = make_engine(str(paths[0]), tokenizer)
    answers = []
    for path in paths:
        names = saved(path)
        assert ("lm_head.weight" in names) == (not tied)
        engine.load(names)
        for tensor in names.values():
            tensor.mul_(-3)
        model = AutoModelForCausalLM.from_pretrained(path)
        answers.append(completions(engine.generate(batch([[3, 9], [4]]))))
        assert answers[-1] == [plain_greedy(model, prompt, {1}, 12) for prompt in ([3, 9], [4])]
    assert answers[0] != answers[1]


@pytest.mark.slow
def test_other_names_in_files_than_in_memory(tmp_path: Path, batch: Any, completions: Any, plain_greedy: Any) -> None:
    """Qwen3-MoE writes one tensor for each expert."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=12,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.3,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    with quiet_transformers():
        model.save_pretrained(tmp_path)
    weights = saved(tmp_path)
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in weights
    engine = make_engine(str(tmp_path), character_tokenizer("0123456789"))
    for _ in range(2):
        engine.load(weights)
        assert completions(engine.generate(batch([[3, 9], [4]]))) == [
            plain_greedy(model, prompt, {1}, 12) for prompt in ([3, 9], [4])
        ]


def test_precision_of_the_own_module(tiny: Any, batch: Any) -> None:
    engine = make_engine(tiny.path, tiny.tokenizer, "bfloat16")
    engine.load(saved(tiny.path))
    assert engine.engine._model is not None
    assert {parameter.dtype for parameter in engine.engine._model.parameters()} == {torch.bfloat16}
    assert engine.generate(batch([[3]]))["logprobs"].dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("already_loaded", [False, True])
def test_weights_that_do_not_fit(tiny: Any, batch: Any, already_loaded: bool) -> None:
    """Each mistake is named, the stream is exhausted, and the engine does not keep half of the weights."""
    good = saved(tiny.path)
    norm = "model.norm.weight"
    cases = {
        "missing: model.norm.weight": {k: v for k, v in good.items() if k != norm},
        "unknown: model.extra": {"model.extra": torch.ones(2), **good},
        "with another shape: model.norm.weight": {**good, norm: torch.ones(31)},
    }
    for message, weights in cases.items():
        engine = make_engine(tiny.path, tiny.tokenizer)
        if already_loaded:
            engine.load(good)
        read: list[str] = []

        def stream(weights: dict[str, Tensor] = weights, read: list[str] = read) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights.items():
                read.append(name)
                yield name, tensor

        with pytest.raises(RefitError, match=message):
            engine.load(weights, stream())
        assert read == list(weights)
        with pytest.raises(EngineNotReady, match="refit it again"):
            engine.generate(batch([[3]]))
        engine.load(good)
        assert engine.generate(batch([[3]])).size == 1


def adapters(model_path: Path, seed: int, rank: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = saved(model_path)[f"{LAYER}.weight"].shape
    matrices = {"lora_A": (rank, columns), "lora_B": (rows, rank)}
    return {f"{LAYER}.{name}.weight": torch.randn(shape, generator=generator) for name, shape in matrices.items()}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_each_refit_starts_from_the_base_and_not_from_the_last(tiny_llama: Path, precision: str) -> None:
    engine, dtype = EngineModel(str(tiny_llama), "cpu", precision), getattr(torch, precision)
    base = saved(tiny_llama)
    for seed in range(3):
        given = adapters(tiny_llama, seed)
        weights = engine.load_adapters(given.items()).state_dict()
        added = given[f"{LAYER}.lora_B.weight"] @ given[f"{LAYER}.lora_A.weight"]
        right = (base[f"{LAYER}.weight"].float() + added).to(dtype)
        torch.testing.assert_close(
            weights[f"{LAYER}.weight"], right, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=0
        )
        for name, weight in base.items():
            assert name == f"{LAYER}.weight" or torch.equal(weights[name], weight.to(dtype)), name


def test_a_layer_that_the_base_lacks_is_rejected(tiny_llama: Path) -> None:
    given = {name.replace("q_proj", "w_proj"): matrix for name, matrix in adapters(tiny_llama, 0).items()}
    with pytest.raises(UserError, match=r"w_proj.*does not have"):
        EngineModel(str(tiny_llama), "cpu", "float32").load_adapters(given.items())


def test_an_unreadable_model_is_reported_with_the_key_to_change(tiny: Any, tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no model configuration can be read from policy\.model_name=.*nowhere"):
        EngineModel(str(tmp_path / "nowhere"), "cpu", "float32").load(iter([]))
    with pytest.raises(DataError, match=r"policy\.lora\.refit=adapters.*set policy\.lora\.refit to merged"):
        EngineModel(str(tmp_path / "nowhere"), "cpu", "float32").load_adapters(adapters(tiny_llama, 0).items())


@pytest.mark.parametrize("first", ["update", "adapters"])
def test_a_head_that_does_not_stay_tied_is_not_used(tmp_path: Path, first: str) -> None:
    """However small the difference is: of a learning rate of 1e-6, probes see nothing."""
    path = make_llama(tmp_path, character_tokenizer("0123456789"), hidden=32, layers=2, tied=True)
    used: list[Any] = []
    adapters = {LAYER + A: torch.zeros(4, 32), LAYER + B: torch.zeros(32, 4)}
    weights = saved(path) if first == "update" else adapters
    model = EngineModel(str(path), "cpu", "float32")

    def update() -> None:
        sink = model.sink({name: (tuple(one.shape), one.dtype) for name, one in weights.items()}, used.append)
        for name, weight in weights.items():
            sink.copy(name, weight)
        sink.finish()

    update()
    (module,) = used
    module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().clone())
    update()  # other memory, but the same values
    assert used == [module, module]
    module.lm_head.weight.data[3, 5] += 1e-6
    with pytest.raises(RefitError, match=r"'lm_head\.weight' is tied to 'model\.embed_tokens\.weight', but differs"):
        update()
    assert used == [module, module]

"""Weights by name (other names in files, rejections), tied heads, and adapters merged or added to whole weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from batched_engine import Batches
from torch import Tensor

from rlframework.base.errors import DataError, EngineNotReady, RefitError, UserError
from rlframework.generation.engine_model import AdaptedWeights, EngineModel
from rlframework.huggingface.model_directories import make_llama, quiet_transformers
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.policy.lora_math import A, B
from rlframework.weight_sync.buffers import WeightInfo
from rlframework.weight_sync.receiver import Held, WeightSink

LAYER = "model.layers.0.self_attn.q_proj"


def make_engine(path: str, tokenizer: Any, precision: str = "float32") -> Batches:
    return Batches.of(path, tokenizer, precision, max_new_tokens=12, temperature=0.0)


def saved(path: str | Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(path) / "model.safetensors")


@pytest.mark.slow
def test_other_names_in_files_than_in_memory(tmp_path: Path, batch: Any, completions: Any, plain_greedy: Any) -> None:
    """Qwen3-MoE writes one tensor for each expert."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 12, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "initializer_range": 0.3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 1, "pad_token_id": 0}
    config = Qwen3MoeConfig(**sizes, **heads, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model.norm.weight": None}, "missing: model.norm.weight"),
        ({"model.extra": torch.ones(2)}, "unknown: model.extra"),
        ({"model.norm.weight": torch.ones(31)}, "with another shape: model.norm.weight"),
    ],
)
def test_weights_that_do_not_fit_are_named_and_not_served(tiny: Any, batch: Any, changed: Any, message: str) -> None:
    good, engine = saved(tiny.path), make_engine(tiny.path, tiny.tokenizer)
    engine.load(good)
    with pytest.raises(RefitError, match=message):
        engine.load({name: weight for name, weight in {**good, **changed}.items() if weight is not None})
    with pytest.raises(EngineNotReady, match="refit it again"):
        engine.generate(batch([[3]]))
    engine.load(good)
    assert engine.generate(batch([[3]])).size == 1


def adapters_of(model_path: Path, seed: int, rank: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = saved(model_path)[f"{LAYER}.weight"].shape
    matrices = {"lora_A": (rank, columns), "lora_B": (rows, rank)}
    return {f"{LAYER}.{name}.weight": torch.randn(shape, generator=generator) for name, shape in matrices.items()}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_each_refit_starts_from_the_base_and_not_from_the_last(tiny_llama: Path, precision: str) -> None:
    engine, dtype = EngineModel(str(tiny_llama), "cpu", precision), getattr(torch, precision)
    base = saved(tiny_llama)
    for seed in range(3):
        given = adapters_of(tiny_llama, seed)
        weights = engine.load_adapters(given.items()).state_dict()
        added = given[f"{LAYER}.lora_B.weight"] @ given[f"{LAYER}.lora_A.weight"]
        right = (base[f"{LAYER}.weight"].float() + added).to(dtype)
        torch.testing.assert_close(
            weights[f"{LAYER}.weight"], right, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=0
        )
        for name, weight in base.items():
            assert name == f"{LAYER}.weight" or torch.equal(weights[name], weight.to(dtype)), name


def test_a_layer_that_the_base_lacks_is_rejected(tiny_llama: Path) -> None:
    given = {name.replace("q_proj", "w_proj"): matrix for name, matrix in adapters_of(tiny_llama, 0).items()}
    with pytest.raises(UserError, match=r"w_proj.*does not have"):
        EngineModel(str(tiny_llama), "cpu", "float32").load_adapters(given.items())


def test_an_unreadable_model_is_reported_with_the_key_to_change(tiny: Any, tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no model configuration can be read from policy\.model_name=.*nowhere"):
        EngineModel(str(tmp_path / "nowhere"), "cpu", "float32").load(iter([]))
    with pytest.raises(DataError, match=r"policy\.lora\.refit=adapters.*set policy\.lora\.refit to merged"):
        EngineModel(str(tmp_path / "nowhere"), "cpu", "float32").load_adapters(adapters_of(tiny_llama, 0).items())


@pytest.mark.parametrize("first", ["update", "adapters"])
def test_a_head_that_does_not_stay_tied_is_not_used(tmp_path: Path, first: str) -> None:
    """However small the difference is: of a learning rate of 1e-6, probes see nothing."""
    path = make_llama(tmp_path, character_tokenizer("0123456789"), hidden=32, layers=2, tied=True)
    used: list[Any] = []
    no_change = {LAYER + A: torch.zeros(4, 32), LAYER + B: torch.zeros(32, 4)}
    weights = saved(path) if first == "update" else no_change
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


CPU = torch.device("cpu")


class Given(WeightSink):
    """The weights of an update; `finished`: whether they are complete."""

    def __init__(self, info: WeightInfo) -> None:
        self.weights = {name: torch.full(shape, torch.nan, dtype=dtype) for name, (shape, dtype) in info.items()}
        self.finished = False

    def target(self, name: str) -> Tensor:
        return self.weights[name]

    def finish(self) -> Held | None:
        self.finished = True
        return None


class Engine:
    """An engine that keeps what it was given; `weights.sink` is its destination."""

    def __init__(self, path: Path, precision: str = "float32") -> None:
        self.given: list[Given] = []
        self.weights = AdaptedWeights(str(path), precision, CPU, self.whole)

    def whole(self, info: WeightInfo) -> WeightSink:
        self.given.append(Given(info))
        return self.given[-1]

    def update(self, weights: dict[str, Tensor]) -> None:
        sink = self.weights.sink({name: (tuple(one.shape), one.dtype) for name, one in weights.items()})
        for name, weight in weights.items():
            sink.copy(name, weight)
        sink.finish()


def adapters(seed: int, layer: str = LAYER) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"lora_A": (2, 32), "lora_B": (32, 2)}
    return {f"{layer}.{name}.weight": torch.randn(shape, generator=draw) for name, shape in shapes.items()}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_engine_gets_all_weights_of_the_base_with_the_latest_adapters_alone(
    tiny_llama: Path, precision: str
) -> None:
    from safetensors.torch import load_file

    base, engine = load_file(tiny_llama / "model.safetensors"), Engine(tiny_llama, precision)
    for seed in (0, 1):
        given = adapters(seed)
        engine.update(given)
        product = given[f"{LAYER}.lora_B.weight"] @ given[f"{LAYER}.lora_A.weight"]
        expected = {**base, f"{LAYER}.weight": base[f"{LAYER}.weight"] + product}
        latest = engine.given[-1]
        assert latest.finished
        assert latest.weights.keys() == base.keys()
        for name, weight in latest.weights.items():
            assert torch.equal(weight, expected[name].to(getattr(torch, precision))), name
    assert len(engine.given) == 2


def test_adapters_of_a_layer_that_the_base_does_not_have_are_rejected_before_the_engine_gets_anything(
    tiny_llama: Path,
) -> None:
    engine = Engine(tiny_llama)
    with pytest.raises(UserError, match="no_proj"):
        engine.update(adapters(0, "model.layers.0.self_attn.no_proj"))
    assert not engine.given

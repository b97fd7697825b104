"""Adapters for an engine that takes whole weights: what it is given are all weights of the base, with the products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlframework.base.errors import UserError
from rlframework.generation.engine_model import AdaptedWeights
from rlframework.weight_sync.buffers import WeightInfo
from rlframework.weight_sync.receiver import Held, WeightSink

LAYER = "model.layers.0.self_attn.q_proj"
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


def test_whole_weights_go_to_the_engine_as_they_come(tiny_llama: Path) -> None:
    engine, weights = Engine(tiny_llama), {"model.norm.weight": torch.arange(32.0)}
    engine.update(weights)
    assert torch.equal(engine.given[0].weights["model.norm.weight"], torch.arange(32.0))
    assert engine.given[0].finished


def test_adapters_of_a_layer_that_the_base_does_not_have_are_rejected_before_the_engine_gets_anything(
    tiny_llama: Path,
) -> None:
    engine = Engine(tiny_llama)
    with pytest.raises(UserError, match="no_proj"):
        engine.update(adapters(0, "model.layers.0.self_attn.no_proj"))
    assert not engine.given

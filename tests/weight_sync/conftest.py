"""A tiny model, an engine for it, and other weights with the same names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframework.config.sections import GenerationConfig
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.generation import GenerationRequest
from rlframework_transformers.engine import TransformersEngine

DEADLINE = 60.0


@dataclass
class Sent:
    """A trainer's weights, and what it announces about them."""

    path: str
    tokenizer: Any
    weights: dict[str, Tensor]

    @property
    def info(self) -> dict[str, Any]:
        return {name: (tuple(weight.shape), weight.dtype) for name, weight in self.weights.items()}

    def engine(self) -> TransformersEngine:
        """An engine whose update to version 0 has begun."""
        config = GenerationConfig(max_new_tokens=4, refit={"deadline": DEADLINE})
        place = {"model_name": self.path, "device": "cpu", "precision": "float32"}
        engine = TransformersEngine(config, self.tokenizer, **place)
        engine.begin_weight_update(0, self.info)
        return engine

    def loaded_by(self, engine: TransformersEngine) -> bool:
        held = engine._model.state_dict()
        return all(torch.equal(held[name], weight) for name, weight in self.weights.items())


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    tokenizer = character_tokenizer("0123456789+= ")
    return make_llama(tmp_path_factory.mktemp("refit") / "llama", tokenizer, hidden=32, layers=1, heads=4), tokenizer


@pytest.fixture
def sent(model_folder) -> Sent:
    from safetensors.torch import load_file

    path, tokenizer = model_folder
    random = torch.Generator().manual_seed(0)
    weights = load_file(path / "model.safetensors")
    return Sent(
        str(path), tokenizer, {name: torch.randn(weight.shape, generator=random) for name, weight in weights.items()}
    )


@pytest.fixture
def serve() -> Callable[[TransformersEngine], int]:
    """Have an engine complete a prompt; return the version of its weights, or raise its error and drop the prompt."""
    request = GenerationRequest("one", torch.tensor([3, 4]), 0, 2)

    def serve(engine: TransformersEngine) -> int:
        engine.submit([replace(request)])
        try:
            (result,) = engine.poll(None)
        finally:
            engine.abort(["one"])
            engine.poll()
        return result.spans[0].version

    return serve

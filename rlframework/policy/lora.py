"""The engine-independent part of LoRA: the base as reference, and saving, loading and sending adapters.

From outside, the model is the merged one under the base's names, so generation and `save_pretrained` need no knowledge
of adapters. The files are described in `checkpoint/adapter.py`. Not supported: several adapters at a time, dropout,
adapters of embeddings and heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

from torch import Tensor

from rlframework.config.policy import LoraConfig
from rlframework.config.sections import GenerationConfig
from rlframework.policy.checkpoint.adapter import read_adapter, write_adapter
from rlframework.policy.engine import Engine, no_adapters
from rlframework.policy.lora_math import B
from rlframework.policy.trained_weights import TrainedWeights
from rlframework.weight_sync.buffers import WeightInfo


class BaseReference:
    """The base model as the reference: the adapters are disabled, and no copy is kept."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def use(self) -> AbstractContextManager[None]:
        """See `Reference.use`."""
        return self._engine.without_adapters()


class Adapters(TrainedWeights):
    """Reads, writes and sends the adapters; the base does not change and is referenced by name."""

    def __init__(self, engine: Engine, generation: GenerationConfig, lora: LoraConfig) -> None:
        super().__init__(engine, generation)
        self._lora = lora

    def transfer_info(self) -> WeightInfo:
        """See `TrainedWeights`; adapters are sent and merged in fp32, so the receiver gets exactly the same."""
        if self._lora.refit != "adapters":
            return super().transfer_info()
        return {name: (spec.shape, spec.dtype) for name, spec in self.engine.adapter_specs().items()}

    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See `TrainedWeights`; B is sent multiplied by the scale, so that the receiver need not know it."""
        if self._lora.refit != "adapters":
            yield from super().gather(names)
            return
        for name, matrix in self.engine.gather_adapters(names):
            yield name, matrix * self._lora.scale if name.endswith(B) else matrix

    def write(self, path: str) -> None:
        """See `TrainedWeights`."""
        self.save(path, checksums=True)

    def save(self, path: str, *, checksums: bool = False) -> None:
        """Write the adapters as a directory that peft reads, from rank 0. Collective."""
        engine = self.engine
        adapters = engine.gather_adapters(engine.adapter_specs())
        if engine.context.rank == 0:
            write_adapter(path, adapters, engine.config.model_name, self._lora, engine.tokenizer, checksums=checksums)
        else:
            for _ in adapters:
                pass

    def read(self, path: str) -> None:
        """Load the adapters from the directory `path`; raise `DataError`, with nothing changed, if they do not fit."""
        specs = self.engine.adapter_specs()
        self.engine.take_adapters(read_adapter(path, specs, self.engine.config.model_name, self._lora))


def require_adapters(weights: TrainedWeights) -> Adapters:
    """Return `weights` if they are adapters; raise `NotSupported` otherwise."""
    if not isinstance(weights, Adapters):
        raise no_adapters(weights.engine)
    return weights

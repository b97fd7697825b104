"""The weights that training changes, as a checkpoint stores them and weight sync sends them: all, or LoRA's adapters.

From outside, a model with adapters is the merged one under the base's names, so generation and `save_pretrained` need
no knowledge of them. Not supported: several adapters at a time, dropout, adapters of embeddings and heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlframework.base.errors import DataError
from rlframework.config.policy import LoraConfig
from rlframework.config.sections import GenerationConfig
from rlframework.policy.checkpoint.pretrained import (
    PendingSave,
    read_config,
    write_files,
    write_from_rank_0,
    write_tensors,
)
from rlframework.policy.checkpoint.saved import Saved, SavedTensors, differences, is_sharded, reject_native
from rlframework.policy.engine import Engine, WeightSpec, no_adapters
from rlframework.policy.lora_math import B
from rlframework.weight_sync.buffers import WeightInfo


class TrainedWeights:
    """Reads, writes and sends the weights of an engine."""

    def __init__(self, engine: Engine, generation: GenerationConfig) -> None:
        self.engine = engine
        self.model_files = {} if engine.context.rank else read_config(engine.config, engine.tokenizer)
        """Files of the model besides its weights, on rank 0, which writes them: the folder may change later."""
        self._refit_dtype = generation.refit.dtype

    def transfer_dtype(self) -> torch.dtype:
        """Return the dtype in which floating-point weights are sent; others keep theirs."""
        chosen = self.engine.config.precision if self._refit_dtype == "auto" else self._refit_dtype
        dtype: torch.dtype = getattr(torch, chosen)
        return dtype

    def transfer_info(self) -> WeightInfo:
        """Return shape and dtype of what a refit sends, by name, in order."""
        dtype = self.transfer_dtype()
        return {
            name: (spec.shape, dtype if spec.dtype.is_floating_point else spec.dtype)
            for name, spec in self.engine.weight_specs().items()
        }

    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors that `transfer_info` describes, one at a time. Collective."""
        return self.engine.gather_weights(names)

    def trained_bytes(self) -> int:
        """Return the bytes that `write` takes at least."""
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in self._trained().values())

    def _trained(self) -> Mapping[str, WeightSpec]:
        return self.engine.weight_specs()

    def save_pretrained(self, path: str, *, save: PendingSave | None = None) -> None:
        """Write the (merged) model as a Hugging Face directory from rank 0. Collective."""
        weights = self.engine.gather_weights(self.engine.weight_specs())

        def write(folder: Path) -> None:
            write_files(folder, self.model_files)
            write_tensors(folder, weights)

        write_from_rank_0(path, self.engine.context.rank, weights, write, save=save)

    def write(self, path: str, save: PendingSave) -> None:
        """Write what training resumes from, apart from the moments, to `path` as a part of `save`. Collective."""
        self.save_pretrained(path, save=save)

    def read(self, path: str) -> None:
        """Load the weights from the directory `path`, in the portable or the sharded form."""
        with open_saved(path) as weights:
            shapes = {name: weights.shape(name) for name in weights}
            if found := differences(shapes, self.engine.weight_specs()):
                raise DataError(f"the checkpoint {path} is for another model: it {found}")
            self.engine.load_weights(weights)


class Adapters(TrainedWeights):
    """Reads, writes and sends the adapters; the base does not change and is referenced by name."""

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

    def _trained(self) -> Mapping[str, WeightSpec]:
        return self.engine.adapter_specs()

    def write(self, path: str, save: PendingSave) -> None:
        """See `TrainedWeights`."""
        self.save(path, save=save)

    def save(self, path: str, *, save: PendingSave | None = None) -> None:
        """Write the adapters as a directory that peft reads, from rank 0. Collective."""
        from rlframework.policy.checkpoint.adapter import write_adapter

        engine = self.engine
        adapters = engine.gather_adapters(engine.adapter_specs())

        def write(folder: Path) -> None:
            write_adapter(folder, adapters, engine.config.model_name, self._lora, engine.tokenizer)

        write_from_rank_0(path, engine.context.rank, adapters, write, save=save)

    def read(self, path: str) -> None:
        """Load the adapters from the directory `path`; raise `DataError`, with nothing changed, if they do not fit."""
        from rlframework.policy.checkpoint.adapter import read_adapter

        specs = self.engine.adapter_specs()
        self.engine.take_adapters(read_adapter(path, specs, self.engine.config.model_name, self._lora))

    @property
    def _lora(self) -> LoraConfig:
        assert self.engine.config.lora is not None
        return self.engine.config.lora


def require_adapters(weights: TrainedWeights) -> Adapters:
    """Return `weights` if they are adapters; raise `NotSupported` otherwise."""
    if not isinstance(weights, Adapters):
        raise no_adapters(weights.engine)
    return weights


def open_saved(folder: str | Path) -> Saved:
    """Open the tensors of `folder` in the portable or the sharded form; a `DataError` for the native one."""
    reject_native(folder)
    if is_sharded(folder):
        from rlframework.policy.checkpoint.sharded import SavedShards

        return SavedShards(folder)
    return SavedTensors(folder)

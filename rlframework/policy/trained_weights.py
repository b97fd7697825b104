"""The weights that training changes, as a checkpoint stores them and weight sync sends them: all of the model's.

With LoRA they are the adapters' matrices: see `rlframework.policy.lora`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlframework.config.sections import GenerationConfig
from rlframework.policy.checkpoint.pretrained import open_saved, write_pretrained
from rlframework.policy.checkpoint.saved import require_weights
from rlframework.policy.engine import Engine
from rlframework.weight_sync.buffers import WeightInfo


class TrainedWeights:
    """Reads, writes and sends the weights of an engine."""

    def __init__(self, engine: Engine, generation: GenerationConfig) -> None:
        self.engine = engine
        self._refit_dtype = generation.refit.dtype

    # -- weight sync --------------------------------------------------------------------------------------------------

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

    # -- files --------------------------------------------------------------------------------------------------------

    def save_pretrained(self, path: str, *, checksums: bool = False) -> None:
        """Write the (merged) model as a Hugging Face directory from rank 0. Collective."""
        engine = self.engine
        weights = engine.gather_weights(engine.weight_specs())
        if engine.context.rank == 0:
            config = engine.config
            write_pretrained(
                path, weights, config.model_name, engine.tokenizer, config.trust_remote_code, checksums=checksums
            )
        else:
            for _ in weights:
                pass

    def write(self, path: str) -> None:
        """Write what training resumes from, apart from the moments, to the directory `path`. Collective."""
        self.save_pretrained(path, checksums=True)

    def read(self, path: str) -> None:
        """Load the weights from the directory `path`, in the portable or the sharded form."""
        with open_saved(path) as weights:
            require_weights(weights, self.engine.weight_specs())
            self.engine.load_weights(weights)

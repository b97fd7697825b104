"""The worker process that runs a generation engine apart from the trainer and gets its weights from refits."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlframework.interfaces.generation import GenerationEngine
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.plugins.loading import load_target
from rlframework.weight_sync.calls import attempt
from rlframework.weight_sync.receiver import EngineState, ReceivesWeights
from rlframework.workers.device import prepare_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import GenerationConfig


class GenerationWorker:
    """One process with one engine, which it constructs from `engine_target` (`module:Class`).

    Calls of `GenerationEngine` that are not below go to the engine.
    """

    def __init__(
        self,
        *,
        engine_target: str,
        generation: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        model_name: str,
        precision: str,
        tf32: bool,
        cudnn_attention: bool,
        context: WorkerContext,
    ) -> None:
        if context.threads:
            import torch

            torch.set_num_threads(context.threads)
        device = "cuda:0" if context.device == "cuda" else context.device  # the worker sees only its own GPU
        prepare_device(device, tf32=tf32, cudnn_attention=cudnn_attention)
        self.context = context
        self.engine: GenerationEngine = load_target(engine_target)(
            generation, tokenizer, model_name=model_name, device=device, precision=precision
        )

    def __getattr__(self, name: str) -> Any:
        if name == "engine":  # the constructor failed before setting it, or `shutdown` was called
            raise AttributeError(name)
        return getattr(self.engine, name)

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """See `GenerationEngine.init_collective`. The engines' ranks follow the trainer's in worker order."""
        self.engine.init_collective(ip, port, world_size, 1 + self.context.rank)

    def require_weights(self) -> None:
        """Raise `UserError` if the last refit is incomplete or failed."""
        if isinstance(self.engine, ReceivesWeights):
            self.engine.require_weights()

    def get_refit_state(self) -> EngineState:
        """Return the engine's state; no device if it does not derive from `ReceivesWeights`."""
        if isinstance(self.engine, ReceivesWeights):
            return self.engine.get_refit_state()
        return {"device": "", "joined": False}

    def attempt(self, method: str, arguments: Mapping[str, Any]) -> tuple[Any, str]:
        """See `calls.attempt`."""
        return attempt(self, method, arguments)

    def get_info(self) -> dict[str, Any]:
        """Return the `rank`, `pid` and `python` executable of this process."""
        return {"rank": self.context.rank, "pid": os.getpid(), "python": sys.executable}

    def shutdown(self) -> None:
        """Release the engine."""
        self.__dict__.pop("engine", None)

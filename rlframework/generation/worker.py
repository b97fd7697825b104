"""The worker process that runs a generation engine apart from the trainer and gets its weights from refits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlframework.errors import RefitError
from rlframework.interfaces.generation import GenerationEngine
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.plugins.loading import load_target
from rlframework.weight_sync.receiver import ReceivesWeights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.batch.batched_data_dict import BatchedDataDict
    from rlframework.config.sections import GenerationConfig


class GenerationWorker:
    """One process with one engine, which it constructs from `engine_target` (`module:Class`)."""

    def __init__(
        self,
        *,
        engine_target: str,
        generation: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        model_name: str,
        precision: str,
        context: WorkerContext,
    ) -> None:
        if context.threads:
            import torch

            torch.set_num_threads(context.threads)
        device = "cuda:0" if context.device == "cuda" else context.device  # the worker sees only its own GPU
        self.context = context
        self.engine: GenerationEngine = load_target(engine_target)(
            generation, tokenizer, model_name=model_name, device=device, precision=precision
        )

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """See `GenerationEngine.generate`; `data` is this worker's shard."""
        return self.engine.generate(data, greedy=greedy)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """See `GenerationEngine.prepare_for_generation`."""
        return self.engine.prepare_for_generation(*args, **kwargs)

    def finish_generation(self) -> bool:
        """See `GenerationEngine.finish_generation`."""
        return self.engine.finish_generation()

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """See `GenerationEngine.init_collective`. The engines' ranks follow the trainer's in worker order."""
        self.engine.init_collective(ip, port, world_size, 1 + self.context.rank)

    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> None:
        """See `GenerationEngine.prepare_refit_info`."""
        self.engine.prepare_refit_info(state_dict_info)

    def offer_refit_memory(self) -> dict[str, Any]:
        """See `GenerationEngine.offer_refit_memory`."""
        return self.engine.offer_refit_memory()

    def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, Any]) -> bool:
        """See `GenerationEngine.update_weights_from_ipc_handles`."""
        return self.engine.update_weights_from_ipc_handles(ipc_handles)

    def update_weights_from_collective(self) -> bool:
        """See `GenerationEngine.update_weights_from_collective`."""
        return self.engine.update_weights_from_collective()

    def require_weights(self) -> None:
        """Raise `UserError` if the last refit is incomplete or failed."""
        if isinstance(self.engine, ReceivesWeights):
            self.engine.require_weights()

    def get_refit_state(self) -> dict[str, Any]:
        """Return `device`, the engine's device id, and `joined`: whether it has a process group for collective refits.

        An engine that does not derive from `ReceivesWeights` reports `""` and False.
        """
        if not isinstance(self.engine, ReceivesWeights):
            return {"device": "", "joined": False}
        return {"device": self.engine.get_refit_device(), "joined": self.engine.has_joined}

    def attempt(self, method: str, arguments: Mapping[str, Any]) -> tuple[Any, str]:
        """Call `method` and return its result and `""`, or None and the message of the `RefitError` it raised.

        An exception would end the whole worker group, but a failed refit can be repeated.
        """
        try:
            return getattr(self, method)(**arguments), ""
        except RefitError as error:
            return None, f"generation worker {self.context.rank}: {error}"

    def get_info(self) -> dict[str, Any]:
        """Return the `rank`, `pid` and `python` executable of this process."""
        import sys

        return {"rank": self.context.rank, "pid": os.getpid(), "python": sys.executable}

    def is_alive(self) -> bool:
        """Return True."""
        return True

    def shutdown(self) -> None:
        """Release the engine."""
        self.__dict__.pop("engine", None)

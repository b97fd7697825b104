"""A worker of a worker group that holds a generation engine and no trainer: it gets its weights by refits."""

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
    """One process with one engine. `engine_target` (`module:Class`) is made as `GenerationEngine` says."""

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
        device = "cuda:0" if context.device == "cuda" else context.device  # it sees its own GPU only
        self.context = context
        self.engine: GenerationEngine = load_target(engine_target)(
            generation, tokenizer, model_name=model_name, device=device, precision=precision
        )

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """See `GenerationEngine.generate`; `data` are this worker's rows."""
        return self.engine.generate(data, greedy=greedy)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """See `GenerationEngine.prepare_for_generation`."""
        return self.engine.prepare_for_generation(*args, **kwargs)

    def finish_generation(self) -> bool:
        """See `GenerationEngine.finish_generation`."""
        return self.engine.finish_generation()

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """See `GenerationEngine.init_collective`: the engines follow the trainer in the order of the workers."""
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
        """A `UserError` where a refit is not complete, or failed."""
        if isinstance(self.engine, ReceivesWeights):
            self.engine.require_weights()

    def get_refit_state(self) -> dict[str, Any]:
        """`device`: what IPC must reach, and `joined`: whether there is a process group for collective refits.

        Of an engine that does not derive from `ReceivesWeights`, nothing is known.
        """
        if not isinstance(self.engine, ReceivesWeights):
            return {"device": "", "joined": False}
        return {"device": self.engine.get_refit_device(), "joined": self.engine.has_joined}

    def attempt(self, method: str, arguments: Mapping[str, Any]) -> tuple[Any, str]:
        """What `method` returns, and an empty text; or None and what a `RefitError` in it says.

        An exception would end the whole group, and a refit that failed can be made again.
        """
        try:
            return getattr(self, method)(**arguments), ""
        except RefitError as error:
            return None, f"generation worker {self.context.rank}: {error}"

    def get_info(self) -> dict[str, Any]:
        """`rank`, `pid`, and the `python` of this process."""
        import sys

        return {"rank": self.context.rank, "pid": os.getpid(), "python": sys.executable}

    def is_alive(self) -> bool:
        """True."""
        return True

    def shutdown(self) -> None:
        """Let go of the engine."""
        self.__dict__.pop("engine", None)

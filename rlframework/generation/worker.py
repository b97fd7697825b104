"""The worker process that runs a generation engine apart from the trainer and gets its weights from refits."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from rlframework.interfaces.generation import (
    GenerationEngine,
    GenerationRequest,
    GenerationResult,
    Incoming,
    Tag,
    submit_each,
)
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.plugins.discovery import load_target
from rlframework.weight_sync.receiver import EngineState, ReceivesWeights
from rlframework.workers.device import prepare_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import GenerationConfig

_ALL: tuple[Tag, ...] = ("weights", "kv_cache")
_CACHE: tuple[Tag, ...] = ("kv_cache",)
_SLICE = 0.1
"""Seconds that an engine serves before the worker looks for a notice of the driver."""


class GenerationWorker:
    """One process with one engine, which it constructs from `engine_target` (`module:Class`).

    `index` numbers the engines of a run. Calls of `GenerationEngine` that are not below go to the engine.
    """

    def __init__(
        self,
        *,
        engine_target: str,
        index: int,
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
        device = "cuda:0" if context.device == "cuda" else context.device  # the worker sees only its own GPUs
        prepare_device(device, tf32=tf32, cudnn_attention=cudnn_attention)
        self.context, self.index = context, index
        self.engine: GenerationEngine = load_target(engine_target)(
            generation, tokenizer, model_name=model_name, device=device, precision=precision
        )

    def __getattr__(self, name: str) -> Any:
        if name == "engine":  # the constructor failed before setting it, or `shutdown` was called
            raise AttributeError(name)
        return getattr(self.engine, name)

    def exchange(
        self, requests: Sequence[GenerationRequest], abort_ids: Collection[str], timeout: float | None
    ) -> Incoming:
        """Abort and submit requests, then serve until some have finished or `timeout` seconds have passed.

        Ends earlier, within about `_SLICE` seconds, if the driver notifies this worker.
        """
        rejected = submit_each(self.engine, requests, abort_ids)
        return Incoming(self._serve(0.0 if rejected else timeout), rejected)

    def _serve(self, timeout: float | None) -> list[GenerationResult]:
        left = math.inf if timeout is None else timeout
        while True:
            begun = time.monotonic()
            results = self.engine.poll(min(left, _SLICE))
            passed = time.monotonic() - begun
            left -= passed
            idle = passed < _SLICE / 2  # it has nothing to serve
            if results or idle or left <= 0 or self.context.notified():
                return results

    def prepare_for_generation(self, tags: Collection[Tag] = _ALL) -> bool:
        """Allocate what `finish_generation` freed; return True. The name is NeMo-RL's."""
        self.engine.restore(tags)
        return True

    def finish_generation(self, tags: Collection[Tag] = _CACHE) -> bool:
        """Free device memory between rollouts; return True. The name is NeMo-RL's."""
        self.engine.release(tags)
        return True

    def get_refit_state(self) -> EngineState:
        """Return the engine's state; no device if it does not derive from `ReceivesWeights`."""
        if isinstance(self.engine, ReceivesWeights):
            return self.engine.get_refit_state()
        return {"device": "", "joined": False}

    attempt = PolicyWorker.attempt

    def get_info(self) -> dict[str, Any]:
        """Return the engine's `index`, and the `pid` and `python` executable of this process."""
        return {"index": self.index, "pid": os.getpid(), "python": sys.executable}

    def shutdown(self) -> None:
        """Close the engine."""
        if (engine := self.__dict__.pop("engine", None)) is not None:
            engine.close()

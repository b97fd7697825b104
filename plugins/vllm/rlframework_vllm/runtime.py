"""vLLM's engine inside this process: what is started, called and undone here. Imports vLLM where it is needed."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from rlframework.base.errors import ConfigError, PluginError
from rlframework.generation.media import ImagePlace
from rlframework.generation.sampling import folded_seed
from rlframework.generation.serving import require_own_process, torch_restored
from rlframework.interfaces.generation import FinishReason, GenerationRequest
from rlframework_vllm.checks import REMOVE

_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine works only when it is called
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # it samples with another sampler
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
_REASONS: Mapping[str | None, FinishReason | None] = {None: None, "stop": "stop", "length": "length"}

Progress = tuple[str, list[int], list[float], FinishReason | None, Sequence[int]]
"""The name of a request, its new tokens, their log-probabilities, why it finished, if it did, and its prompt."""


class Runtime:
    """A running vLLM with weights of no meaning, to be replaced with `call`."""

    def __init__(self, *, images: tuple[str, int] | None = None, never: Sequence[int] = (), **arguments: Any) -> None:
        """Start vLLM with `arguments` of its `EngineArgs`. Raises `ConfigError` if it does not start.

        `images`: those of `take_tensors`. `never`: tokens that are not sampled.
        """
        require_own_process("vLLM")
        os.environ |= _VARIABLES
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        # tqdm's own lock has a name, so multiprocessing reports a leaked semaphore if this process is killed
        import_module("tqdm").tqdm.set_lock(threading.RLock())
        with torch_restored():
            _import_vllm()
            self._start(images, never, arguments)

    def _start(self, images: tuple[str, int] | None, never: Sequence[int], arguments: dict[str, Any]) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from rlframework_vllm.inside_vllm import engine_input, install, take_tensors

        try:
            if images is not None:
                arguments |= take_tensors(*images)
            self._input = engine_input
            self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
            self._engine.collective_rpc(install, args=(never,))
            self._warm_up()
        except (ValueError, RuntimeError, MemoryError) as error:
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
            raise ConfigError(
                f"vLLM does not start with the settings of generation.vllm: {str(error).strip().splitlines()[0]}"
            ) from error

    def _warm_up(self) -> None:
        """Compute a token of two rows. vLLM compiles a function for it, which is a part of the start."""
        for name in ("warm-up 0", "warm-up 1"):
            self.add(GenerationRequest(name, torch.tensor([0]), 0, 1), 1, 0, 0)
        while self._engine.has_unfinished_requests():
            list(self.step())
        self.drop_caches()

    def add(
        self, request: GenerationRequest, max_tokens: int, top_k: int, version: int, places: Sequence[ImagePlace] = ()
    ) -> None:
        """Accept a request with images at `places`.

        In the caches it finds only prefixes and images of requests with the same `version` of the weights.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        parameters = SamplingParams(
            temperature=sampling.temperature,
            top_k=top_k,
            top_p=sampling.top_p,
            seed=folded_seed(request.seed),
            max_tokens=max_tokens,
            stop_token_ids=sorted(sampling.stop_token_ids),
            ignore_eos=True,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = self._input(self._engine.renderer, request.prompt_ids.tolist(), places, version)
        self._engine.add_request(request.request_id, prompt, parameters)

    def step(self) -> Iterator[Progress]:
        """Compute one forward, and yield what it added."""
        with torch.random.fork_rng(devices=[]):
            outputs = self._engine.step()
        for output in outputs:
            (row,) = output.outputs
            logprobs = row.logprobs.logprobs if row.logprobs else []
            reason = _REASONS[row.finish_reason]
            yield output.request_id, list(row.token_ids), logprobs, reason, output.prompt_token_ids

    def abort(self, names: Collection[str]) -> None:
        """End requests without results."""
        self._engine.abort_request(list(names))

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the results of `function(worker, *arguments)` in each of vLLM's workers."""
        results: list[Any] = self._engine.collective_rpc(function, args=arguments)
        return results

    def drop_caches(self) -> int:
        """Drop all keys, values and features of images, also of running requests, which compute them again.

        Returns the cached tokens.
        """
        core = self._engine.engine_core.engine_core
        cached = len(core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._engine.reset_encoder_cache()
        return cached * int(self._engine.vllm_config.cache_config.block_size)

    def sleep(self, *, weights: bool) -> None:
        """Free the cache and, with `weights`, the weights, on a GPU."""
        if weights:
            self._engine.sleep(level=2)
        else:
            self._engine.engine_core.engine_core.pause_scheduler("keep", clear_cache=True)
            self._engine.release_kv_cache_memory()

    def wake(self, tags: Collection[str]) -> None:
        """Allocate again what `sleep` freed."""
        self._engine.wake_up(list(tags))

    def close(self) -> None:
        """End vLLM, and the processes that it started."""
        self._engine.engine_core.shutdown()
        del self._engine
        gc.collect()  # frees its semaphore while multiprocessing still counts it


def _import_vllm() -> None:
    """Import vLLM; raise `PluginError` if that fails, which no setting of a run can cause."""
    try:
        for module in ("vllm.v1.engine.llm_engine", "rlframework_vllm.inside_vllm"):
            import_module(module)
    except Exception as error:
        raise PluginError(
            f"vLLM cannot be imported in the engines' environment ({sys.executable}): {type(error).__name__}: "
            f"{(str(error).strip() or 'no message').splitlines()[0]}. Its packages do not fit together; no setting of "
            f"generation.vllm is the cause. On a CPU: `{REMOVE.format(python=sys.executable)}`; docs/vllm.md says how "
            "to install vLLM"
        ) from error

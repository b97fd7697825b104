"""The driver's handle on generation: in the trainer's workers, or in workers of its own (`generation.remote`)."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlframework.base.loop_thread import LoopThread
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.generation.batch import batch_of, requests_of
from rlframework.generation.client import GenerationClient
from rlframework.generation.completions import Completions, require_version
from rlframework.generation.engine_handle import EmbeddedEngines, EngineHandle
from rlframework.generation.result_contract import ResultContract
from rlframework.generation.stop_tokens import stop_tokens
from rlframework.interfaces.generation import GenerationRequest, GenerationResult, SamplingParams
from rlframework.plugins.types import PROBE_BOUNDS
from rlframework.policy.batch_checks import BatchLimits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.policy.client import Policy

R = TypeVar("R")


_MOVED = ("RemoteGeneration", "refit_policy_generation")
"""Names that are in `generation.remote` now: importing them from here warns for a release."""


class Generation:
    """Generates on all workers of a policy: `prepare_for_generation`, any number of `generate`, `finish_generation`."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        engines: Sequence[EngineHandle] | None = None,
        *,
        probe_bounds: Mapping[str, float] = PROBE_BOUNDS,
    ) -> None:
        """Start nothing. `engines`: None for those embedded in the workers of `policy`.

        `probe_bounds`: those of the engine's record.
        """
        self.probe_bounds = probe_bounds
        run = policy.config
        self.config, self._limits = run.generation, BatchLimits.of(run.policy)
        self._pad_id = int(tokenizer.pad_token_id)
        self._stop_tokens = stop_tokens(run.generation, tokenizer, run.policy.model_name, run.policy.trust_remote_code)
        limit = run.generation.max_in_flight or 2 * run.generation.batch_size
        served_by = engines or [EmbeddedEngines(policy.worker_group, "the engine in the trainer's workers")]
        contract = ResultContract(run.generation.name, self._limits.vocabulary, lambda: self.weights_version)
        self.client = GenerationClient(served_by, limit=limit, require_ready=self._require_ready, contract=contract)
        """The client of the engines, for requests that finish one by one."""

    def prepare_for_generation(self) -> bool:
        """Return True when ready; engines inside the trainer's processes always are."""
        return True

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of generation since the last call, by name; embedded engines have none."""
        return {}

    def shutdown(self) -> bool:
        """Shut down workers started only for generation; embedded engines have none."""
        for engine in self.client.engines:
            engine.close()
        return True

    def finish_generation(self) -> bool:
        """Have the engines free their caches between rollouts. Raises like `GenerationClient.drain`."""
        run_in_loop(self.client.drain())
        return all(all(engine.call("finish_generation")) for engine in self.client.engines)

    def generate(
        self, data: BatchedDataDict[Any], greedy: bool = False, *, temperature: float | None = None
    ) -> BatchedDataDict[Any]:
        """Complete each row; input as in `rlframework.generation.batch.requests_of`, output as in `batch_of`.

        `temperature`: None for that of the run. The engines get contiguous shards of nearly equal size, so adjacent
        equal prompts are mostly prefilled once. Raises a `BatchError`, before an engine gets anything, for prompts
        that are not as described there, and a `RefitError` for tokens sampled with other weights than those of
        `weights_version`.
        """
        self._limits.check_prompts(data)
        requests = requests_of(data, self.config, self._stop_tokens, temperature=0.0 if greedy else temperature)
        results = run_in_loop(self._complete(requests))
        require_version({span.version for result in results for span in result.spans}, self.weights_version)
        return batch_of(results, [request.prompt_ids for request in requests], self._pad_id)

    @asynccontextmanager
    async def completions(
        self,
        *,
        temperature: float | None = None,
        stop_token_ids: Collection[int] = (),
        kind: type[Completions] = Completions,
    ) -> AsyncIterator[Completions]:
        """Context with `Completions` of single prompts, in the event loop of `run_in_loop`.

        `temperature`: None for that of the run. `stop_token_ids`: tokens that end a completion besides those of the
        run, such as the end of a turn. Call `prepare_for_generation` before and `finish_generation` after it.

        Raises a `RefitError` at its end, unless an error ends it, for tokens sampled with other weights than those of
        `weights_version`, unless `kind` allows several versions.
        """
        config, stops = self.config, self._stop_tokens.union(stop_token_ids)
        used = config.temperature if temperature is None else temperature
        sampling = SamplingParams(used, config.top_k, config.top_p, stops)
        completions = kind(
            self.client, sampling, max_new_tokens=config.max_new_tokens, positions=self._limits.positions
        )
        yield completions
        if not kind.several_versions:
            require_version(completions.versions, self.weights_version)

    @property
    def weights_version(self) -> int | None:
        """The version of the weights in all engines; None if it is not known to the driver, but the same in all."""
        return None

    def _require_ready(self) -> None:
        """Raise `EngineNotReady` if the engines have no weights to serve requests with."""

    async def _complete(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        shards = np.array_split(np.arange(len(requests)), self.client.lanes)
        lanes = [lane for lane, rows in enumerate(shards) for _ in rows]
        return await self.client.generate_all(requests, lanes)


def run_in_loop(task: Coroutine[Any, Any, R]) -> R:
    """Run `task` in an event loop; in another thread if this one has a running loop, as in a notebook.

    An interrupt cancels the task and is raised when that has ended, within about a second.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        has_loop = False
    else:
        has_loop = True
    # not in the `except` above, or each error of `task` would have that one as its context
    if not has_loop:
        return asyncio.run(task)
    thread = LoopThread(lambda: task, "generation")
    try:
        return thread.result.result()
    except KeyboardInterrupt:
        thread.end()  # or the task would go on beside what the user does next
        raise
    finally:
        thread.join()


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = "rlframework.generation.remote"  # which imports this module
    warnings.warn(f"{__name__}.{name} is now {new}.{name}", DeprecationWarning, stacklevel=2)
    return getattr(import_module(new), name)

"""The engine's side of requests: base classes that implement the serving methods of `GenerationEngine`.

Software of an engine may act on its whole process: on torch's global state, process groups and a GPU's memory.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlframework.base.errors import ConfigError, WorkerError
from rlframework.config.sections import GenerationConfig
from rlframework.generation.requests import ServingLimits, check_requests
from rlframework.huggingface.model_directories import read_config
from rlframework.interfaces.generation import FinishReason, GenerationRequest, GenerationResult, Tag, WeightSpan
from rlframework.weight_sync.receiver import ReceivesWeights

if TYPE_CHECKING:
    from rlframework.generation.media import ImagePlace


@dataclass(eq=False)
class Served(ABC):
    """An unfinished request. `starts`: the first token of each weight version, and the version."""

    request: GenerationRequest
    starts: list[tuple[int, int]] = field(default_factory=list, init=False)

    def use(self, version: int, count: int) -> None:
        """Note that the tokens from `count` on are sampled with the weights of `version`."""
        if not self.starts or self.starts[-1][1] != version:
            self.starts.append((count, version))

    @abstractmethod
    def completion(self) -> tuple[Tensor, Tensor]:
        """Return the tokens, int64, and their log-probabilities, fp32; both [t] and on the CPU."""

    def result(self, reason: FinishReason) -> GenerationResult:
        """Return what there is, ended for `reason`."""
        tokens, logprobs = self.completion()
        return GenerationResult(self.request.request_id, tokens, logprobs, reason, self._spans(len(tokens)))

    def _spans(self, length: int) -> tuple[WeightSpan, ...]:
        ends = [*(start for start, _ in self.starts[1:]), length]
        spans = (
            WeightSpan(start, min(end, length), version)
            for (start, version), end in zip(self.starts, ends, strict=False)
        )
        return tuple(span for span in spans if span.start < span.end)


@dataclass(eq=False)
class Collected(Served):
    """An unfinished request whose tokens the engine gets as numbers, some at a time. `places`: of its images."""

    places: Sequence[ImagePlace] = ()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, version: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add tokens that were sampled with the weights of `version`."""
        self.use(version, len(self.tokens))
        self.tokens += tokens
        self.logprobs += logprobs

    def require_prompt(self, tokens: Sequence[int]) -> None:
        """Raise `WorkerError` unless the prompt that the engine used has these `tokens`."""
        if list(tokens) != self.request.prompt_ids.tolist():
            raise WorkerError(f"the engine changed the prompt of request {self.request.request_id!r}: report a bug")

    def completion(self) -> tuple[Tensor, Tensor]:
        """See `Served.completion`."""
        return torch.tensor(self.tokens, dtype=torch.int64), torch.tensor(self.logprobs, dtype=torch.float32)


S = TypeVar("S", bound=Served)


class ServingEngine(ReceivesWeights, Generic[S]):
    """The serving side of a `GenerationEngine`: checks requests, polls, and keeps the results until they are returned.

    A subclass implements `accepted`, `step` and `withdraw`. Its requests are in `_served`, in order of arrival, and in
    `_waiting` too until it removes them there: those that it has not begun.
    """

    def __init__(
        self,
        config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model_name: str,
        device: str,
        precision: str,
    ) -> None:
        self._config, self._model_name, self._precision = config, model_name, precision
        self.refit_device, self.refit_deadline = torch.device(device), config.refit.deadline
        self._served: dict[str, S] = {}
        self._waiting: dict[str, S] = {}
        self._results: list[GenerationResult] = []
        self._paused = False

    # -- implemented by the engine -------------------------------------------------------------------------------------

    @abstractmethod
    def accepted(self, request: GenerationRequest) -> S:
        """Return the record of a request that was checked, and waits now."""

    @abstractmethod
    def step(self, version: int) -> bool:
        """Compute for a short time with the weights of `version`; return whether there are new tokens.

        Begins what waits, and calls `finish` for what is complete.
        """

    @abstractmethod
    def withdraw(self, names: Collection[str]) -> object:
        """Stop computing requests of these ids, which do not wait; they keep the tokens that they have."""

    def serving(self) -> AbstractContextManager[object]:
        """Return the context in which steps are computed."""
        return nullcontext()

    @cached_property
    def model_config(self) -> Any:
        """The configuration of the model, from its files."""
        return read_config(self._model_name)

    @cached_property
    def limits(self) -> ServingLimits:
        """The requests that the model can serve."""
        return ServingLimits.of(self.model_config)

    def collected(self, request: GenerationRequest) -> Collected:
        """Return a record of a request that was checked, with the places of its images if the model takes images.

        Raises `RequestError` unless the prompt has a token for each feature of its images.
        """
        if self.limits.no_media is not None:
            return Collected(request, ())
        from rlframework.generation.media import image_places

        return Collected(request, image_places(request, self.model_config))

    def begin_again(self) -> None:
        """Stop computing all requests, which lose their tokens and wait."""
        self.withdraw([name for name in self._served if name not in self._waiting])
        self._served = {name: self.accepted(served.request) for name, served in self._served.items()}
        self._waiting = dict(self._served)

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `GenerationEngine.submit`.

        If a prompt leaves fewer than `max_new_tokens` of the model's positions, its completion gets the remaining ones.
        """
        check_requests(requests, self.limits, self._served.keys())
        accepted = {request.request_id: self.accepted(request) for request in requests}
        self._served |= accepted
        self._waiting |= accepted

    def poll(self, timeout: float | None = 0.0) -> list[GenerationResult]:
        """See `GenerationEngine.poll`. A step is not interrupted when the time has passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._served and not self._paused and not self._results:
            version, advanced = self.weight_state.require(), False
            with self.serving():
                while self._served and not self._results:
                    advanced |= self.step(version)
                    if advanced and deadline is not None and time.monotonic() >= deadline:
                        break
        results, self._results = self._results, []
        return results

    def abort(self, request_ids: Collection[str]) -> None:
        """See `GenerationEngine.abort`."""
        ending = [name for name in dict.fromkeys(request_ids) if name in self._served]
        self.withdraw([name for name in ending if name not in self._waiting])
        for name in ending:
            self.finish(name, "aborted")

    def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        """See `GenerationEngine.pause`."""
        self._paused = True
        if mode == "abort":
            self.abort(list(self._served))

    def resume(self) -> None:
        """See `GenerationEngine.resume`."""
        self._paused = False

    def finish(self, name: str, reason: FinishReason) -> S:
        """End a request, whose result the next `poll` returns, and return its record."""
        served = self._served.pop(name)
        self._waiting.pop(name, None)
        self._results.append(served.result(reason))
        return served


@contextmanager
def torch_restored() -> Iterator[None]:
    """Restore the random state, the number of threads, and `torch.set_num_threads`; hide warnings of future changes."""
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about its own names
        try:
            yield
        finally:
            torch.set_num_threads = set_threads
            torch.set_num_threads(threads)


def require_own_process(engine: str) -> None:
    """Raise `ConfigError` if this process has a process group, such as that of another engine.

    `engine`: the name of the software.
    """
    if torch.distributed.is_initialized():
        raise ConfigError(
            f"{engine} needs a process of its own, and this one has a process group already: close the other engine, "
            "or set generation.workers.group to processes or ray"
        )


class Sleeper(Protocol):
    """Software that serves requests."""

    def sleep(self, *, weights: bool) -> None:
        """Free the cache and, with `weights`, the weights. It serves no requests now."""

    def wake(self, tags: Collection[str]) -> None:
        """Allocate again what `sleep` freed."""


class SleepingEngine(ServingEngine[S]):
    """Implements `release` and `restore` on a GPU. On a CPU nothing is freed.

    `_started` is the software; None: it has not started.
    """

    _started: Sleeper | None = None
    _asleep: Set[Tag] = frozenset()

    def release(self, tags: Collection[Tag] = ("weights", "kv_cache")) -> int:
        """See `GenerationEngine.release`. The cache goes with the weights.

        Unfinished requests lose their caches and begin again, with the same samples unless the weights change.
        """
        if self.refit_device.type == "cpu" or self._started is None or self._asleep >= set(tags):
            return 0
        self.begin_again()
        before, weights_too = self._free(), "weights" in tags
        self._started.sleep(weights=weights_too)
        self._asleep = {"weights", "kv_cache"} if weights_too else {"kv_cache"}
        if weights_too:
            self.weight_state.fail("its weights were released")
        return self._free() - before

    def restore(self, tags: Collection[Tag] = ("weights", "kv_cache")) -> int:
        """See `GenerationEngine.restore`."""
        asleep = self._asleep & set(tags)
        if self._started is None or not asleep:
            return 0
        before = self._free()
        self._started.wake(asleep)
        self._asleep -= asleep
        return before - self._free()

    def _free(self) -> int:
        return int(torch.cuda.mem_get_info(self.refit_device)[0])

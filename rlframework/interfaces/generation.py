"""The generation interface, version 2: requests in, completions with log-probabilities and weight versions out.

An engine continuously serves requests that finish one by one. `rlframework.generation.batch.generate` completes a
whole batch with it; `rlframework.generation.client.GenerationClient` distributes requests over several engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rlframework.base.errors import NotSupported, RequestError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import GenerationConfig

FinishReason = Literal["stop", "length", "aborted"]
"""Why a completion ended: with one of the stop tokens, at `max_new_tokens` or the model's last position, or aborted."""

Tag = Literal["weights", "kv_cache"]
"""A part of an engine's device memory that it can release."""


@dataclass(frozen=True)
class SamplingParams:
    """The choice of tokens.

    `temperature` 0 is greedy, with the log-probabilities of temperature 1. `stop_token_ids` are all tokens that end a
    completion: the engine adds none of its own.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def greedy(self) -> bool:
        """Whether to choose the most likely token."""
        return self.temperature == 0.0

    @property
    def truncated(self) -> bool:
        """Whether sampling is restricted to the most likely tokens."""
        return not self.greedy and (self.top_k is not None or self.top_p < 1.0)


class _SentBetweenProcesses:
    """Pickles the elements of tensors, where torch pickles the whole storage of a view."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value if type(value) in _PLAIN else _compact(value) for name, value in vars(self).items()}


_PLAIN = {str, int, float, tuple, type(None), SamplingParams}
"""Types that are pickled as they are: most fields, of thousands of requests in each exchange."""


def _compact(value: Any) -> Any:
    """Return what is pickled instead of `value`, a tensor, a mapping of them, or anything else."""
    from rlframework.batch.packed_tensor import picklable

    if hasattr(value, "untyped_storage"):
        return picklable(value)
    return {key: _compact(each) for key, each in value.items()} if isinstance(value, Mapping) else value


@dataclass(frozen=True, eq=False)
class GenerationRequest(_SentBetweenProcesses):
    """A prompt to complete. The sample depends on `prompt_ids`, `seed`, `sampling` and the weights, and nothing else.

    `prompt_ids`: 1-D int64 on the CPU, at least one token. `seed`: a signed 64-bit integer, all bits significant.
    `session_id`: requests with the same id share prefixes, so they are sent to the same engine. `media`: the model's
    multimodal inputs.
    """

    request_id: str
    prompt_ids: Tensor
    seed: int
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    session_id: str | None = None
    media: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise `RequestError` for an empty prompt, another dtype, a seed of more bits, and no tokens to generate."""
        if self.prompt_ids.ndim != 1 or not len(self.prompt_ids):
            raise RequestError(
                f"request {self.request_id!r} has prompt_ids of shape {tuple(self.prompt_ids.shape)}; it needs at "
                "least one token, in one dimension"
            )
        if str(self.prompt_ids.dtype) != "torch.int64":
            raise RequestError(
                f"request {self.request_id!r} has prompt_ids in {self.prompt_ids.dtype}; they must be torch.int64"
            )
        if not -(2**63) <= self.seed < 2**63:
            raise RequestError(f"request {self.request_id!r} has seed={self.seed}; it must be a signed 64-bit integer")
        if self.max_new_tokens < 1:
            raise RequestError(
                f"request {self.request_id!r} has max_new_tokens={self.max_new_tokens}; it must be at least 1"
            )


class WeightSpan(NamedTuple):
    """The tokens `start` to `end` (exclusive) of a completion, sampled with the weights of `version`."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, eq=False)
class GenerationResult(_SentBetweenProcesses):
    """The completion of a request.

    `token_ids`: 1-D int64 on the CPU, including the stop token. `logprobs`: 1-D fp32, of each token at the sampling
    temperature (greedy: at temperature 1), before top-k and top-p. `spans` are consecutive and cover all tokens.
    """

    request_id: str
    token_ids: Tensor
    logprobs: Tensor
    finish_reason: FinishReason
    spans: tuple[WeightSpan, ...]


@dataclass(frozen=True)
class WeightReport:
    """An engine's statement of the weights that it holds after an update.

    `checksums`: of each weight that it holds under the name and in the bytes in which it was sent, as in
    `rlframework.weight_sync.buffers.checksum`; weights that it fused, sharded or repacked are left out.
    `dropped_tokens`: cached tokens of earlier versions that were dropped. `start_seconds`: the part of the update in
    which the engine's software started, if it had not before.
    """

    version: int
    checksums: Mapping[str, int] = field(default_factory=dict)
    dropped_tokens: int = 0
    start_seconds: float = 0.0


class GenerationEngine(ABC):
    """Serves requests with the most recent weights it was given.

    An embedded engine runs in the trainer's process: `attach` gives it the live module without a copy or, if the
    trainer's module is sharded, its separate module is updated with `load_weights`. The engine must not change the
    weights or the train/eval mode of an attached module. An engine in a separate process receives its weights through
    a transport. It serves nothing before it has weights, from `begin_weight_update` to `finish_weight_update`, and
    after an update that failed: `poll` with unfinished requests then raises `EngineNotReady`.

    An engine does nothing on its own that could change results: it serves requests only inside `poll`, or as if it did.
    """

    @abstractmethod
    def __init__(
        self,
        config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model_name: str,
        device: str,
        precision: str,
    ) -> None:
        """Construct cheaply: load nothing before the first weights."""

    # -- requests ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Accept requests, in order of arrival.

        Raises `RequestError`, accepting none of them, for an id in use, a token outside the vocabulary, a prompt that
        leaves the model no position, and sampling that the engine does not support.
        """

    @abstractmethod
    def poll(self, timeout: float | None = 0.0) -> list[GenerationResult]:
        """Serve requests until one or more finish, or `timeout` seconds have passed (None: no limit).

        Returns those that finished, each once, and immediately if there is nothing to serve. Advances at least one
        token even if `timeout` is 0.
        """

    @abstractmethod
    def abort(self, request_ids: Collection[str]) -> None:
        """End requests: the next `poll` returns them with the tokens they have. Finished or unknown ids are ignored."""

    def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        """Serve nothing until `resume`, so that weights may be updated. `abort` also aborts all requests.

        With `keep`, requests go on with the new weights; their caches are computed again, except by an engine that is
        configured to keep them. Idempotent.
        """
        raise NotSupported(f"{type(self).__name__} does not pause requests")

    def resume(self) -> None:
        """Serve requests again. Idempotent."""

    # -- weights -------------------------------------------------------------------------------------------------------

    def attach(self, model: torch.nn.Module, version: int) -> None:
        """Use `model` itself from now on, whose weights are those of `version`.

        `model` is a transformers causal LM with unsharded parameters. Called again whenever its weights changed.
        """
        raise NotSupported(f"{type(self).__name__} does not run inside the trainer's process")

    @abstractmethod
    def begin_weight_update(self, version: int, specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Prepare to receive the weights of `version`: names as `save_pretrained` writes them, shapes and dtypes.

        An update in progress is discarded. Raises `RefitError` for weights that do not fit the model.
        """

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take some or all of the announced weights. Copy each before asking for the next: its memory may be reused.

        Raises `RefitError` for a weight that was not announced, or in another shape or dtype.
        """

    @abstractmethod
    def finish_weight_update(self) -> WeightReport:
        """Use the new weights from now on, all together; drop what was computed with other weights.

        Raises `RefitError`, naming them, if announced weights have not arrived.
        """

    def init_collective(self, ip: str, port: int, world_size: int, rank: int = 1) -> None:
        """Join the process group for collective refits: the trainer, at `ip` and `port`, is rank 0; engines follow.

        Raises `RefitError` if the others do not join within `generation.refit.deadline` seconds.
        """
        raise NotSupported(f"{type(self).__name__} does not receive weights over a process group")

    def offer_refit_memory(self) -> dict[str, Any]:
        """Return receive buffers for `prepare_weights_for_ipc`, by device id, during a weight update.

        Empty if this engine has no memory that other processes can write to.
        """
        return {}

    def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, Any]) -> bool:
        """Take one group of weights from `ipc_handles`, device id to the result of `get_weights_ipc_handles` there.

        Reads the memory before it returns. Returns True.
        """
        raise NotSupported(f"{type(self).__name__} does not receive weights through IPC handles")

    def update_weights_from_collective(self) -> bool:
        """Receive all weights, which the trainer broadcasts at the same time; return True.

        Raises `RefitError` if the trainer is gone or sends nothing for `generation.refit.deadline` seconds.
        """
        raise NotSupported(f"{type(self).__name__} does not receive weights over a process group")

    # -- memory --------------------------------------------------------------------------------------------------------

    def release(self, tags: Collection[Tag] = ("weights", "kv_cache")) -> int:
        """Free device memory; return the bytes freed. Without "weights", the engine keeps them and can go on."""
        return 0

    def restore(self, tags: Collection[Tag] = ("weights", "kv_cache")) -> int:
        """Allocate what `release` freed; return the bytes. Weights are undefined until the next update."""
        return 0

    def close(self) -> None:
        """Free everything, and end processes that the engine started. Idempotent."""


@dataclass(frozen=True)
class Outgoing:
    """Requests to submit to an engine, in order, and the ids of those to abort."""

    requests: tuple[GenerationRequest, ...] = ()
    abort_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Incoming:
    """Finished requests, and by request id why others were rejected."""

    results: list[GenerationResult] = field(default_factory=list)
    rejected: dict[str, RequestError] = field(default_factory=dict)


def submit_each(
    engine: GenerationEngine, requests: Sequence[GenerationRequest], abort_ids: Collection[str] = ()
) -> dict[str, RequestError]:
    """Abort the requests of `abort_ids` and submit `requests`; return by id why some of them were rejected.

    A rejected request does not affect the others. Errors are returned, because one that is raised ends the worker.
    """
    if abort_ids:
        engine.abort(abort_ids)
    if not requests:
        return {}
    try:
        engine.submit(requests)
    except RequestError as error:
        if len(requests) == 1:
            return {requests[0].request_id: error}
        rejected: dict[str, RequestError] = {}
        for request in requests:
            rejected |= submit_each(engine, [request])
        return rejected
    return {}

"""The contract of a `GenerationResult`, checked in the driver for each result of each engine.

A result that breaks it would become training rows: tokens that were not sampled, log-probabilities of other tokens, or
spans that hide how stale the tokens are. So it ends the run. All results of an exchange are checked together: some
microseconds for each, and array operations over their tokens.

What only the policy can tell (log-probabilities of other weights, a changed token, results of two requests exchanged)
shows where the policy scores the tokens: `rlframework.algorithms.sampling_check`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from rlframework.base.errors import EngineFault
from rlframework.interfaces.generation import FinishReason, GenerationRequest, GenerationResult, Incoming, WeightSpan

_REASONS = frozenset(get_args(FinishReason))
_ABOVE_ZERO = 1e-4
"""The log-probability, in nats, up to which a certain token may be above 0 by rounding."""


class Answer(NamedTuple):
    """A result with its request. `aborted`: whether the driver has aborted the request."""

    request: GenerationRequest
    result: GenerationResult
    aborted: bool


def no_version() -> None:
    """Return None: the version of the weights is not known to the driver."""


@dataclass(frozen=True)
class ResultContract:
    """Checks results of the engine `name`, as in `generation.name`.

    `vocabulary`: the number of the model's tokens. `version`: that of the weights of all engines. Both may be unknown
    (None), and are not checked then.
    """

    name: str = "unnamed"
    vocabulary: int | None = None
    version: Callable[[], int | None] = no_version

    def require_form(self, incoming: Incoming) -> None:
        """Raise `EngineFault` unless `incoming` has a list of `GenerationResult`s with a request id each."""
        if not isinstance(incoming.results, list):
            raise EngineFault(f"poll returned a {type(incoming.results).__name__}; it must return a list of results")
        for result in incoming.results:
            if not isinstance(result, GenerationResult) or type(result.request_id) is not str:
                raise EngineFault(f"poll returned {result!r:.200}; each result must be a GenerationResult with its id")

    def check_probes(self, engine: str, incoming: Incoming, requests: Mapping[str, GenerationRequest]) -> None:
        """Check what the handle `engine` has answered to `requests`, which nobody aborts; other results are ignored."""
        try:
            self.require_form(incoming)
            results = (result for result in incoming.results if result.request_id in requests)
            self.check([Answer(requests[result.request_id], result, aborted=False) for result in results])
        except EngineFault as error:
            raise self.blamed(engine, error) from error

    def blamed(self, engine: str, error: EngineFault) -> EngineFault:
        """Return `error` with the handle `engine` that it is of, and what to do."""
        return EngineFault(
            f"{engine} ({self.name!r}) broke the contract of generation engines: {error}. "
            f"Report it to the authors of its plugin; `rlframework conformance {self.name}` looks for more"
        )

    def check(self, answers: Sequence[Answer]) -> None:
        """Raise `EngineFault` for the first of `answers` that breaks the contract; it names the request."""
        version = self.version()
        for answer in answers:
            if (wrong := _wrong_form(answer) or _wrong_spans(answer.result, version)) is not None:
                raise _fault(answer, wrong)
        if answers:
            self._check_values(answers)

    def _check_values(self, answers: Sequence[Answer]) -> None:
        """Check tokens and log-probabilities, which are those of all answers one after the other."""
        ids = np.concatenate([answer.result.token_ids.numpy() for answer in answers])
        logprobs = np.concatenate([answer.result.logprobs.numpy() for answer in answers])
        ends = np.cumsum([len(answer.result.token_ids) for answer in answers])
        right = (logprobs <= _ABOVE_ZERO) & (logprobs > -np.inf)
        if not right.all():
            raise _wrong_logprob(*_located(answers, ends, int(np.argmin(right))))
        unknown = ids < 0 if self.vocabulary is None else (ids < 0) | (ids >= self.vocabulary)
        if unknown.any():
            answer, index = _located(answers, ends, int(np.argmax(unknown)))
            allowed = "0 or more" if self.vocabulary is None else f"0 to {self.vocabulary - 1}"
            wrong = f"token {index} is {int(answer.result.token_ids[index])}; the model's tokens are {allowed}"
            raise _fault(answer, wrong)
        _check_stops(answers, ids, ends)


def _wrong_form(answer: Answer) -> str | None:
    """Return what is wrong with types, lengths and the reason of a result."""
    request, result, aborted = answer
    for name, dtype in (("token_ids", torch.int64), ("logprobs", torch.float32)):
        value = getattr(result, name)
        if not isinstance(value, torch.Tensor):
            return f"{name} is a {type(value).__name__}; it must be a tensor"
        if value.dtype != dtype or value.ndim != 1 or value.device.type != "cpu" or value.requires_grad:
            gradient = ", with gradients" if value.requires_grad else ""
            got = f"{value.dtype} of shape {tuple(value.shape)} on {value.device}{gradient}"
            return f"{name} is {got}; it must be {dtype} with one dimension, on the CPU"
    count = len(result.token_ids)
    if len(result.logprobs) != count:
        return f"it has {count} tokens and {len(result.logprobs)} log-probabilities; it must have one for each token"
    if not isinstance(result.finish_reason, str) or result.finish_reason not in _REASONS:
        return f"finish_reason is {result.finish_reason!r}; it must be one of {', '.join(sorted(_REASONS))}"
    if result.finish_reason == "aborted" and not aborted:
        return "it was aborted, but nobody has aborted the request"
    if not count and result.finish_reason != "aborted":
        return f"it has no token, with finish_reason {result.finish_reason!r}; it must have at least one"
    if count > request.max_new_tokens:
        return f"it has {count} tokens; the request allows max_new_tokens={request.max_new_tokens}"
    return None


def _wrong_spans(result: GenerationResult, version: int | None) -> str | None:
    """Return what is wrong with the spans of a result. Without a span, nobody knows how stale a token is."""
    spans: Any = result.spans
    if type(spans) is not tuple or not all(_is_span(span) for span in spans):
        return f"spans is {spans!r:.200}; it must be a tuple of WeightSpan(start, end, version), all integers"
    end = 0
    for span in spans:
        if span.start != end or span.end <= span.start:
            return f"its spans are {_shown(spans)}; they must follow each other from token 0, none of them empty"
        end = span.end
    if end != len(result.token_ids):
        return f"its spans are {_shown(spans)}; they must cover its {len(result.token_ids)} tokens"
    if version is not None and (others := sorted({span.version for span in spans} - {version})):
        return f"it has tokens of weights version {others[0]}; the weights of all engines are version {version}"
    return None


def _is_span(span: Any) -> bool:
    return isinstance(span, WeightSpan) and type(span.start) is type(span.end) is type(span.version) is int


def _shown(spans: Sequence[WeightSpan]) -> str:
    listed = ", ".join(f"{span.start} to {span.end} (version {span.version})" for span in spans[:4])
    return (listed + (", ..." if len(spans) > 4 else "")) or "empty"


def _wrong_logprob(answer: Answer, index: int) -> EngineFault:
    value = float(answer.result.logprobs[index])
    wrong = f"the log-probability of token {index} is {value:g}; it must be finite and at most 0"
    if not np.isfinite(value):
        wrong += (
            ". Either the engine is wrong, or the policy's weights are not finite any more: look at train/loss and "
            "train/grad_norm of the steps before"
        )
    return _fault(answer, wrong)


def _check_stops(answers: Sequence[Answer], ids: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    """Raise `EngineFault` unless stopped completions end with their first stop token, and others have none."""
    sets = {answer.request.sampling.stop_token_ids for answer in answers}
    if len(sets) > 1:
        for each_set in sets:
            same = [answer for answer in answers if answer.request.sampling.stop_token_ids == each_set]
            of_each = [answer.result.token_ids.numpy() for answer in same]
            _check_stops(same, np.concatenate(of_each), np.cumsum([len(each) for each in of_each]))
        return
    stopping = _stop_table(next(iter(sets))).take(ids, mode="clip")
    before = np.concatenate(([0], np.cumsum(stopping)))
    starts = np.concatenate(([0], ends[:-1]))
    counts = before[ends] - before[starts]
    last = np.append(stopping, False)[ends - 1]  # of an empty completion, anything: its count is 0
    stopped = np.array([answer.result.finish_reason == "stop" for answer in answers])
    right = np.where(stopped, (counts == 1) & last, counts == 0)
    if not right.all():
        answer = answers[int(np.argmin(right))]
        count, reason = int(counts[np.argmin(right)]), answer.result.finish_reason
        stops = sorted(answer.request.sampling.stop_token_ids)
        raise _fault(
            answer,
            f"finish_reason is {reason!r}, and {count} of its tokens end a completion (last token "
            f"{int(answer.result.token_ids[-1])}, stop tokens {stops}); a completion ends with its first stop token, "
            'and then the reason is "stop"',
        )


@lru_cache(maxsize=16)
def _stop_table(stops: frozenset[int]) -> NDArray[np.bool_]:
    """Whether each token is a stop token; the last entry, for all greater tokens, is False."""
    table = np.zeros(max(stops, default=0) + 2, dtype=np.bool_)
    table[[token for token in stops if token >= 0]] = True
    return table


def _located(answers: Sequence[Answer], ends: NDArray[np.int64], position: int) -> tuple[Answer, int]:
    """Return the answer that has the token at `position` of all tokens, and its index in the completion."""
    row = int(np.searchsorted(ends, position, side="right"))
    return answers[row], position - (int(ends[row - 1]) if row else 0)


def _fault(answer: Answer, wrong: str) -> EngineFault:
    return EngineFault(f"the result of request {answer.request.request_id!r} is wrong: {wrong}")

"""The proof that engines hold and use the weights that the trainer sent: checksums, and probes.

A checksum on arrival does not show that a weight is in use, nor in its place. A probe is a prompt of which the engine
samples one token. The trainer computes the log-probabilities of all tokens after that prompt, without waiting for the
engine, and the sampled one's must be close. Probes do not see a change of the weights that changes log-probabilities by
less than the bound; checksums do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.sections import GenerationConfig
from rlframework.errors import RefitError
from rlframework.interfaces.generation import GenerationRequest, GenerationResult, SamplingParams, WeightReport
from rlframework.interfaces.policy_worker import Rows
from rlframework.weight_sync.buffers import WeightInfo
from rlframework.weight_sync.calls import RefitCalls, RefitEngine, StartedCall
from rlframework.weight_sync.receiver import listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONG, _SHORT = 40, 8  # tokens; the first prompt fills a block of a prefix cache, which has up to 32
_POLL = 1.0  # seconds
_REMEDY = "the engine does not use the weights of the trainer: see the page on generation workers, or report a bug"


def sent_by_all(ranks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Combine what each of the trainer's ranks sent; raise `RefitError` if two sent different bytes of a weight."""
    sent: dict[str, int] = {}
    for rank, sums in enumerate(ranks):
        different = [name for name, value in sums.items() if sent.setdefault(name, value) != value]
        if different:
            raise RefitError(
                f"rank {rank} of the trainer sent other bytes of {listed(different)} than an earlier rank: the ranks' "
                "weights differ"
            )
    return sent


def compare_reports(engine: str, report: WeightReport, version: int, info: WeightInfo, sent: Mapping[str, int]) -> None:
    """Raise `RefitError` unless `engine` holds `version` of the weights `info`, with the checksums `sent`."""
    if missing := [name for name in info if name not in sent]:
        raise RefitError(f"version {version}: the trainer did not send {listed(missing)}")
    require_version(engine, report, version)
    for name, held in report.checksums.items():
        if name not in sent:
            raise RefitError(f"{engine} reports a weight {name!r} of version {version}, which the trainer did not send")
        if held != sent[name]:
            raise RefitError(
                f"{engine} holds {name!r} of version {version} with checksum {held:016x}; the trainer sent "
                f"{sent[name]:016x}"
            )


def require_version(engine: str, report: WeightReport, version: int) -> None:
    """Raise `RefitError` unless `engine` finished its update with `version`."""
    if report.version != version:
        raise RefitError(f"{engine} finished its update with version {report.version}; the trainer sent {version}")


class Probes:
    """Prompts that each engine completes by one token after a refit, at the sampling settings of the run.

    Half of the prompts are the same for each version, to hit what an engine cached with earlier weights; the others are
    new. `bound` limits the mean absolute difference between the log-probabilities of an engine and of the trainer.
    """

    def __init__(
        self, count: int, tokens: ArrayLike, sampling: SamplingParams, bound: float, positions: int | None = None
    ) -> None:
        """`tokens`: those that prompts consist of. `positions`: the longest row of the model; None: unlimited."""
        self._count, self._tokens, self._sampling, self.bound = count, np.asarray(tokens), sampling, bound
        most = _LONG if positions is None else max(1, positions - 1)
        self._lengths = min(_LONG, most), min(_SHORT, most)

    @classmethod
    def of(
        cls,
        config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        bounds: Mapping[str, float],
        dtype: str,
        positions: int | None = None,
    ) -> Probes | None:
        """Return the probes of a run, none if `generation.refit.probes` is 0.

        `bounds`: those of the engine's record. `dtype`: that of the engine's weights.
        """
        if not config.refit.probes:
            return None
        special = [*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})]
        tokens = np.setdiff1d(np.arange(len(tokenizer)), special)
        bound = bounds[dtype] if config.refit.probe_bound is None else config.refit.probe_bound
        sampling = SamplingParams(config.temperature, config.top_k, config.top_p)
        return cls(
            config.refit.probes, tokens if len(tokens) else np.arange(len(tokenizer)), sampling, bound, positions
        )

    def of_version(self, version: int) -> ProbeRequests:
        """Return the probes of `version`."""
        unique = uuid4().hex[:8]
        requests = [self._request(index, version, f"probe-{unique}-{index}") for index in range(self._count)]
        return ProbeRequests(version, self.bound, requests)

    def _request(self, index: int, version: int, request_id: str) -> GenerationRequest:
        repeated = index % 2 == 0
        random = np.random.default_rng([index] if repeated else [index, version])
        prompt = random.choice(self._tokens, self._lengths[0 if index == 0 else 1])
        seed = int(np.random.default_rng([index, version]).integers(0, 2**62))
        session = f"probe-{index}" if repeated else None
        return GenerationRequest(request_id, torch.from_numpy(prompt).long(), seed, 1, self._sampling, session)


@dataclass(frozen=True, eq=False)
class ProbeRequests:
    """The probes of `version` of the weights."""

    version: int
    bound: float
    requests: Sequence[GenerationRequest]

    @property
    def prompts(self) -> Rows:
        """The rows after which the trainer computes the log-probabilities of the next token."""
        rows = [request.prompt_ids for request in self.requests]
        lengths = torch.tensor([len(row) for row in rows])
        return BatchedDataDict({"input_ids": pad_sequence(rows, batch_first=True), "input_lengths": lengths})

    def ask(self, calls: RefitCalls, deadline: float) -> ProbeAnswers:
        """Have all engines complete the prompts within `deadline` seconds."""
        names = {request.request_id for request in self.requests}
        answers = {engine: dict[str, GenerationResult]() for engine in calls.engines}
        until, waiting = time.monotonic() + deadline, list(calls.engines)
        outgoing = self.requests
        while waiting:
            left = until - time.monotonic()
            if left <= 0:
                raise RefitError(
                    f"{waiting[0].name} did not complete the probes of version {self.version} within {deadline:g} s "
                    "(generation.refit.deadline)"
                )
            arguments = {"requests": tuple(outgoing), "abort_ids": (), "timeout": min(left, _POLL)}
            started = [StartedCall(engine, "exchange", arguments) for engine in waiting]
            for call, incoming in zip(started, calls.of_engines(started), strict=True):
                self._require_accepted(call.engine, incoming.rejected)
                answers[call.engine] |= {result.request_id: result for result in incoming.results}
            outgoing, waiting = [], [engine for engine in waiting if not answers[engine].keys() >= names]
        by_name = {engine.name: [found[each.request_id] for each in self.requests] for engine, found in answers.items()}
        return ProbeAnswers(self, by_name)

    def _require_accepted(self, engine: RefitEngine, rejected: Mapping[str, Exception]) -> None:
        for error in rejected.values():
            raise RefitError(f"{engine.name} rejected a probe: {error}") from error


@dataclass(frozen=True, eq=False)
class ProbeAnswers:
    """The tokens that engines sampled after the prompts of `probes`, by the engine's name."""

    probes: ProbeRequests
    answers: Mapping[str, Sequence[GenerationResult]]

    def __post_init__(self) -> None:
        """Raise `RefitError` unless each answer is one token, sampled with the weights of the version."""
        wanted = self.probes.version
        for engine, results in self.answers.items():
            for number, result in enumerate(results):
                versions = [span.version for span in result.spans]
                if len(result.token_ids) != 1 or versions != [wanted]:
                    raise RefitError(
                        f"{engine} answered probe {number} of version {wanted} with {len(result.token_ids)} "
                        f"tokens of versions {versions}; expected one token of version {wanted}"
                    )

    def compare(self, logprobs: Tensor) -> float:
        """Compare with the trainer's `logprobs [P, V]` after each prompt; return the largest error of an engine.

        Raises `RefitError` if it exceeds the bound.
        """
        worst = 0.0
        for engine, results in self.answers.items():
            trainer = [self._trainers(engine, *each, logprobs) for each in enumerate(results)]
            differences = [abs(float(each.logprobs) - one) for each, one in zip(results, trainer, strict=True)]
            error = float(np.mean(differences))
            if not error <= self.probes.bound:  # also for nan
                self._fail(engine, differences, trainer, error)
            worst = max(worst, error)
        return worst

    def _trainers(self, engine: str, probe: int, result: GenerationResult, logprobs: Tensor) -> float:
        """Return the trainer's log-probability of the token that `engine` sampled."""
        token, vocabulary = int(result.token_ids), logprobs.shape[1]
        if not 0 <= token < vocabulary:
            raise RefitError(
                f"{engine} answered probe {probe} of version {self.probes.version} with token {token}; the trainer's "
                f"vocabulary has {vocabulary} tokens: {_REMEDY}"
            )
        return float(logprobs[probe, token])

    def _fail(self, engine: str, differences: Sequence[float], trainer: Sequence[float], error: float) -> None:
        probe = int(np.argmax(np.nan_to_num(differences, nan=np.inf)))
        result, prompt = self.answers[engine][probe], self.probes.requests[probe].prompt_ids
        raise RefitError(
            f"{engine} was refit to version {self.probes.version}, but gives token {int(result.token_ids)} after the "
            f"{len(prompt)} tokens of probe {probe} the log-probability {float(result.logprobs):.5g}, the trainer "
            f"{trainer[probe]:.5g}; the mean difference of its {len(trainer)} probes is {error:.3g}, and at most "
            f"{self.probes.bound:g} is allowed (generation.refit.probe_bound): {_REMEDY}"
        )

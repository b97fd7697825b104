"""Probes: prompts that each engine completes after a refit, whose tokens the trainer scores too.

They show that an engine uses the weights it holds, in each way that it computes tokens: prefill and decoding, few and
many rows at a time, short and long prompts, with and without a session whose prefix is cached from earlier weights. A
probe samples several tokens at the settings of the run, and the trainer computes the log-probabilities of exactly these
tokens in one forward of the finished rows. What changes log-probabilities by less than the bound is not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlframework.base.errors import RefitError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.sections import GenerationConfig
from rlframework.interfaces.generation import GenerationRequest, GenerationResult, Incoming, SamplingParams
from rlframework.interfaces.policy_worker import PolicyWorker, Rows
from rlframework.weight_sync.calls import RefitCalls
from rlframework.weight_sync.proof import NoiseBound

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE_HEADROOM = {"float32": 10.0}
"""How many times the noise so far the mean of the probes may have, by dtype.

The mean of so few tokens varies by a factor of 3, and logits grow in training. The noise of 16 bits is near their
limit, and grows from that of a random model to 20 times as much, so it does not tighten the bound.
"""
_SHORT, _LONG, _LONGEST = 5, 56, 256  # tokens of prompts; a long one fills a block of a prefix cache, of up to 32
_TOKENS, _MORE, _FEW = 3, 8, 2  # tokens sampled after a prompt: usually, in a thorough refit, by its further rows
_MOST_ROWS = 4  # rows of a thorough refit, as a multiple of the usual number
_POLL = 1.0  # seconds
_REMEDY = "the engine does not use the weights of the trainer: see the page on generation workers, or report a bug"


Check = Callable[[str, Incoming, Mapping[str, GenerationRequest]], object]
"""Raises for an answer of the engine of this name to some of the requests, by id, that breaks the contract."""


def _unchecked(engine: str, incoming: Incoming, requests: Mapping[str, GenerationRequest]) -> None:
    """Accept every answer."""


class ProbeShape(NamedTuple):
    """The number of tokens of a prompt, and how many are sampled after it."""

    prompt: int
    sampled: int


def probe_shapes(count: int, *, thorough: bool, batch_size: int, positions: int | None) -> list[ProbeShape]:
    """Return the shapes of the probes of a refit: `count`, the first with a long prompt.

    `thorough`: with a second one that is longer, with more tokens each, and with further rows, up to one more than the
    engine decodes at a time (`batch_size`). `positions`: the longest row of the model; None: unlimited.
    """
    shapes = [ProbeShape(_SHORT, _MORE if thorough else _TOKENS)] * count
    shapes[0] = ProbeShape(_LONG, shapes[0].sampled)
    if thorough:
        shapes[1:2] = [ProbeShape(_LONGEST, _MORE)] * (count > 1)
        shapes += [ProbeShape(_SHORT, _FEW)] * (min(batch_size + 1, _MOST_ROWS * count) - count)
    if positions is None:
        return shapes
    fitting = (ProbeShape(prompt, max(1, min(sampled, positions - 1))) for prompt, sampled in shapes)
    return [ProbeShape(max(1, min(prompt, positions - sampled)), sampled) for prompt, sampled in fitting]


class Probes:
    """The probes of a run, whose engines get the same ones.

    Every second prompt is the same for each version and of the same session, to hit what an engine cached with earlier
    weights; the others are new, half of them without a session. Thorough are the refits number 1, 2, 4, 8 and so on: an
    engine that keeps weights of its first version shows it at the second one, or later if the first steps change
    little, as in a warm-up.
    """

    def __init__(
        self,
        count: int,
        tokens: ArrayLike,
        sampling: SamplingParams,
        bound: NoiseBound,
        *,
        batch_size: int = 1,
        positions: int | None = None,
        check: Check = _unchecked,
    ) -> None:
        """`tokens`: those that prompts consist of. `batch_size`, `positions`: see `probe_shapes`."""
        self._count, self._tokens, self._sampling, self._bound = count, np.asarray(tokens), sampling, bound
        self._batch_size, self._positions, self._check = batch_size, positions, check
        self._name, self._refits = uuid4().hex, 0

    @classmethod
    def of(
        cls,
        config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        bound: NoiseBound,
        *,
        positions: int | None = None,
        check: Check = _unchecked,
    ) -> Probes | None:
        """Return the probes of a run, none if `generation.refit.probes` is 0."""
        if not config.refit.probes:
            return None
        special = [*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})]
        tokens = np.setdiff1d(np.arange(len(tokenizer)), special)
        return cls(
            config.refit.probes,
            tokens if len(tokens) else np.arange(len(tokenizer)),
            SamplingParams(config.temperature, config.top_k, config.top_p),
            bound,
            batch_size=config.batch_size,
            positions=positions,
            check=check,
        )

    def of_version(self, version: int) -> ProbeRequests:
        """Return the probes of the next refit, to `version`."""
        self._refits += 1
        thorough = self._refits & (self._refits - 1) == 0
        shapes = probe_shapes(self._count, thorough=thorough, batch_size=self._batch_size, positions=self._positions)
        requests = [self._request(index, version, shape) for index, shape in enumerate(shapes)]
        return ProbeRequests(version, self._bound, requests, self._check)

    def _request(self, index: int, version: int, shape: ProbeShape) -> GenerationRequest:
        repeated = index % 2 == 0
        random = np.random.default_rng([index] if repeated else [index, version])
        prompt = random.choice(self._tokens, shape.prompt)
        seed = int(np.random.default_rng([index, version]).integers(-(2**63), 2**63))
        number = index if repeated else f"{index}.{self._refits}"
        session = None if index % 4 == 3 else f"{self._name}:session:{number}"  # as those of `Completions`
        name = f"{self._name}:{index}.{self._refits}"
        return GenerationRequest(name, torch.from_numpy(prompt).long(), seed, shape.sampled, self._sampling, session)


@dataclass(frozen=True, eq=False)
class ProbeRequests:
    """The probes of a refit to `version` of the weights."""

    version: int
    bound: NoiseBound
    requests: Sequence[GenerationRequest]
    check: Check = _unchecked

    def ask(self, calls: RefitCalls, deadline: float) -> ProbeAnswers:
        """Have all engines complete the prompts within `deadline` seconds."""
        requests = {request.request_id: request for request in self.requests}
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
            started = calls.of(waiting).start_engines(
                PolicyWorker.exchange, requests=tuple(outgoing), abort_ids=(), timeout=min(left, _POLL)
            )
            for call, incoming in zip(started, calls.of_engines(started), strict=True):
                self.check(call.engine.name, incoming, requests)
                for error in incoming.rejected.values():
                    raise RefitError(f"{call.engine.name} rejected a probe: {error}") from error
                answers[call.engine] |= {result.request_id: result for result in incoming.results}
            outgoing, waiting = [], [engine for engine in waiting if not answers[engine].keys() >= requests.keys()]
        by_name = {engine.name: [of_engine[name] for name in requests] for engine, of_engine in answers.items()}
        return ProbeAnswers(self, by_name)


@dataclass(frozen=True, eq=False)
class ProbeAnswers:
    """The tokens that engines sampled after the prompts of `probes`, by the engine's name."""

    probes: ProbeRequests
    answers: Mapping[str, Sequence[GenerationResult]]

    def __post_init__(self) -> None:
        """Raise `RefitError` unless answers have the tokens asked for, sampled with the weights of the version."""
        for engine, results in self.answers.items():
            for probe, result in enumerate(results):
                self._require_whole(engine, probe, result)

    def _require_whole(self, engine: str, probe: int, result: GenerationResult) -> None:
        wanted, count = self.probes.version, self.probes.requests[probe].max_new_tokens
        versions = sorted({span.version for span in result.spans})
        if len(result.token_ids) != count or versions != [wanted]:
            raise RefitError(
                f"{engine} answered probe {probe} of version {wanted} with {len(result.token_ids)} tokens of versions "
                f"{versions}; expected {count} of version {wanted}"
            )

    @cached_property
    def _rows(self) -> dict[tuple[int, tuple[int, ...]], int]:
        """The row of each probe with the tokens sampled after it: engines that sampled the same share it."""
        sampled = {_key(*each): None for results in self.answers.values() for each in enumerate(results)}
        return {key: row for row, key in enumerate(sampled)}

    @property
    def rows(self) -> Rows:
        """The prompts with their completions, for `PolicyWorker.get_logprobs` at the `token_mask`."""
        prompts = [self.probes.requests[probe].prompt_ids for probe, _ in self._rows]
        completions = [torch.tensor(tokens) for _, tokens in self._rows]
        pairs = list(zip(prompts, completions, strict=True))
        masks = [torch.cat((torch.zeros(len(one)), torch.ones(len(two)))) for one, two in pairs]
        return BatchedDataDict(
            {
                "input_ids": pad_sequence([torch.cat(pair) for pair in pairs], batch_first=True),
                "input_lengths": torch.tensor([len(mask) for mask in masks]),
                "token_mask": pad_sequence(masks, batch_first=True),
            }
        )

    def compare(self, logprobs: Tensor) -> float:
        """Compare with the trainer's `logprobs [R, S]` of `rows`; return the largest error of an engine.

        That is the mean difference over the tokens after its short prompts, or after its long ones, which are too few
        to count among all. Raises `RefitError` if it exceeds the bound.
        """
        worst = 0.0
        for engine, results in self.answers.items():
            trainer = [self._trainers(*each, logprobs) for each in enumerate(results)]
            differences = [(each.logprobs - right).abs() for each, right in zip(results, trainer, strict=True)]
            lengths = [len(request.prompt_ids) for request in self.probes.requests]
            for long in (False, True):
                rows = [row for row, length in enumerate(lengths) if (length > _SHORT) == long]
                error = float(torch.cat([differences[row] for row in rows]).mean()) if rows else 0.0
                if not error <= self.probes.bound.value:  # also for nan
                    self._fail(engine, rows, differences, trainer, error)
                worst = max(worst, error)
        self.probes.bound.accepted(worst)
        return worst

    def _trainers(self, probe: int, result: GenerationResult, logprobs: Tensor) -> Tensor:
        """Return the trainer's log-probabilities of the tokens that an engine sampled."""
        start = len(self.probes.requests[probe].prompt_ids)
        return logprobs[self._rows[_key(probe, result)], start : start + len(result.token_ids)]

    def _fail(
        self, engine: str, rows: Sequence[int], differences: Sequence[Tensor], trainer: Sequence[Tensor], error: float
    ) -> None:
        """Raise a `RefitError` that names the token that differs most."""
        compared = [(row, index) for row in rows for index in range(len(differences[row]))]
        worst = torch.cat([differences[row] for row in rows]).nan_to_num(nan=torch.inf).argmax()
        probe, index = compared[int(worst)]
        result, prompt = self.answers[engine][probe], self.probes.requests[probe].prompt_ids
        raise RefitError(
            f"{engine} was refit to version {self.probes.version}, but gives token {int(result.token_ids[index])}, "
            f"sampled token {index + 1} after the {len(prompt)} tokens of probe {probe}, the log-probability "
            f"{float(result.logprobs[index]):.5g}, the trainer {float(trainer[probe][index]):.5g}; the mean difference "
            f"of {len(compared)} tokens after such prompts is {error:.3g}, and at most {self.probes.bound.value:.3g} "
            f"is allowed (generation.refit.probe_bound): {_REMEDY}"
        )


def _key(probe: int, result: GenerationResult) -> tuple[int, tuple[int, ...]]:
    return probe, tuple(result.token_ids.tolist())

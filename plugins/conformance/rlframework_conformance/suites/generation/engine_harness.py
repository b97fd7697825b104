"""The harness of the generation suite: tiny models, engines with weights, and checks of their results.

Where an engine does not run embedded, its weights are loaded wherever a test attaches a module to one that does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlframework.interfaces.generation import GenerationRequest, GenerationResult, SamplingParams, WeightReport
from rlframework.plugins.types import Capability
from rlframework_conformance import cases
from rlframework_conformance.harness import Harness
from rlframework_conformance.policies import read_weights
from rlframework_conformance.suites.plain_decoding import PlainDecoder, pearson

ALPHABET = "0123456789+= "
END, PLUS = 1, 12
"""Token ids of the tokenizer's end token and of `+`."""
VOCABULARY = 16
POSITIONS = 128
"""Tokens of the longest sequence that the models take."""

PROMPTS = ([5], [3, 9, 4, 12, 6], [7, 2, 13] * 7, [14, 13], [8] * 11, [4, 12], [6, END], [END, 5, END], [10, 11, 2])
"""Ragged prompts, some containing an end token. Their greedy completions end at different steps, without near-ties."""

SPREAD = [4, 12]
"""A prompt followed by a flat distribution."""

PATIENCE = 60.0
"""Seconds in which one of the requests of a test must finish."""


@dataclass
class GenerationHarness(Harness):
    """Models are created once in `models`; the plain decoder has its own copy of the weights."""

    _decoders: dict[Path, PlainDecoder] = field(default_factory=dict)
    _engines: ExitStack = field(default_factory=ExitStack)

    @property
    def embedded(self) -> bool:
        """Whether the engine runs in the trainer's process, with the trainer's module."""
        return Capability.EMBEDDED_GENERATION in self.record.capabilities

    # -- models --------------------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Any:
        """A tokenizer of one token per character."""
        from rlframework.huggingface.tokenizer import character_tokenizer

        return character_tokenizer(ALPHABET)

    def path(self, seed: int = 0, *, tied: bool = True) -> Path:
        """Return the directory of a 2-layer Llama with peaked distributions; another `seed` gives other weights.

        Heads have 32 dimensions, and a head's query projection is square.
        """
        from rlframework.huggingface.model_directories import make_llama

        path = self.models / f"generation_{seed}{'' if tied else '_untied'}"
        if not path.exists():
            sizes = {"hidden": 64, "intermediate": 64, "layers": 2, "heads": 2, "kv_heads": 1}
            make_llama(path, self.tokenizer, **sizes, max_positions=POSITIONS, tied=tied, init_std=0.3, seed=seed)
        return path

    def plain(self, path: Path | None = None) -> PlainDecoder:
        """Return the plain decoder of the model at `path`."""
        path = path or self.path()
        if path not in self._decoders:
            self._decoders[path] = PlainDecoder(path)
        return self._decoders[path]

    def module(self, path: Path | None = None) -> Any:
        """Return the model as a trainer has it, in training mode."""
        return cases.load(path or self.path()).to(self.device).train()

    def weights(self, path: Path | None = None) -> dict[str, Tensor]:
        """Return the weights under the names that `save_pretrained` writes."""
        return {name: tensor.to(self.device) for name, tensor in read_weights(path or self.path()).items()}

    # -- engines -------------------------------------------------------------------------------------------------------

    def bare_engine(self, *, path: Path | None = None, precision: str = "float32", **settings: Any) -> Any:
        """Build an engine without weights, as a worker builds it, and close the one before: a worker has one."""
        from rlframework.config.sections import GenerationConfig

        config_model: Any = self.record.config_model or GenerationConfig
        config = config_model(**{"name": self.record.name, **self.section, **settings})
        place = {"model_name": str(path or self.path()), "device": self.device, "precision": precision}
        self._engines.close()
        engine = self.load_class()(config, self.tokenizer, **place)
        self._engines.callback(engine.close)
        return engine

    def close(self) -> None:
        """Close the engine, and release the other resources of the test."""
        self._engines.close()
        super().close()

    def engine(self, *, path: Path | None = None, **settings: Any) -> Any:
        """Build an engine with the weights at `path`, of version 1."""
        engine = self.bare_engine(path=path, **settings)
        self.give(engine, path or self.path(), 1)
        return engine

    def give(self, engine: Any, path: Path, version: int) -> None:
        """Attach the module at `path`, or load its weights into an engine that does not run embedded."""
        if self.embedded:
            engine.attach(self.module(path), version)
        else:
            self.update(engine, self.weights(path), version)

    @staticmethod
    def update(engine: Any, weights: Mapping[str, Tensor], version: int) -> WeightReport:
        """Give the engine `weights` in the three phases of an update."""
        engine.begin_weight_update(version, specs_of(weights))
        engine.load_weights(weights.items())
        report: WeightReport = engine.finish_weight_update()
        return report

    # -- requests ------------------------------------------------------------------------------------------------------

    def complete(
        self, engine: Any, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None = None, **sampling: Any
    ) -> list[GenerationResult]:
        """Submit `requests_of(...)`, and return their results in order."""
        requests = requests_of(prompts, seeds, **sampling)
        engine.submit(requests)
        return self.collect(engine, requests)

    def collect(self, engine: Any, requests: Iterable[GenerationRequest]) -> list[GenerationResult]:
        """Poll until all unfinished requests, `requests`, have come back once; return the results in order."""
        results: dict[str, GenerationResult] = {}
        expected = [request.request_id for request in requests]
        while missing := [name for name in expected if name not in results]:
            finished = engine.poll(PATIENCE)
            what = "poll returns without a result only after its timeout, if requests are unfinished"
            self.require(finished, what, got=f"{len(missing)} requests are unfinished")
            self.keep(results, finished, expected)
        self.keep(results, engine.poll(0.0), expected)
        return [results[name] for name in expected]

    def keep(
        self, results: dict[str, GenerationResult], finished: Iterable[GenerationResult], expected: Collection[str]
    ) -> None:
        """Add `finished` to `results`; each must be one of the `expected` requests, and come back once."""
        for result in finished:
            name = result.request_id
            self.require(name in expected, "results are those of unfinished requests", got=name, expected=expected)
            self.require(name not in results, f"request {name} comes back once")
            results[name] = result

    # -- checks --------------------------------------------------------------------------------------------------------

    def require_greedy(
        self,
        what: str,
        prompts: Sequence[Sequence[int]],
        results: Sequence[GenerationResult],
        decoder: PlainDecoder,
        ends: Collection[int] = (END,),
    ) -> None:
        """Require the plain decoder's greedy completions and their log-probabilities; lengths may be shorter."""
        for row, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            wanted = decoder.greedy(prompt, ends, len(result.token_ids))
            self.equal(f"the completion of row {row}, prompt {list(prompt)} ({what})", tokens_of(result), wanted)
        self.require_logprobs(what, prompts, results, decoder)

    def require_logprobs(
        self,
        what: str,
        prompts: Sequence[Sequence[int]],
        results: Sequence[GenerationResult],
        decoder: PlainDecoder | Mapping[int, PlainDecoder],
        temperature: float = 1.0,
    ) -> None:
        """Require the plain decoder's log-probabilities at `temperature`, or those of the decoder of each version."""
        expected = []
        for prompt, result in zip(prompts, results, strict=True):
            ids, start = [*prompt, *tokens_of(result)], len(prompt)
            if isinstance(decoder, PlainDecoder):
                expected.append(decoder.logprobs(ids, start, temperature)[start:])
                continue
            of_version = {span.version: decoder[span.version] for span in result.spans}
            whole = {name: one.logprobs(ids, start, temperature)[start:] for name, one in of_version.items()}
            expected += [whole[span.version][span.start : span.end] for span in result.spans]
        got = torch.cat([result.logprobs for result in results])
        self.values(f"log-probabilities of the completions ({what})", got, torch.cat(expected))

    def require_same(
        self, what: str, results: Sequence[GenerationResult], expected: Sequence[GenerationResult]
    ) -> None:
        """Require equal tokens and reasons, and log-probabilities up to rounding."""
        for row, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            self.equal(f"the completion of row {row} ({what})", tokens_of(result), tokens_of(wanted))
            self.equal(f"finish_reason of row {row} ({what})", result.finish_reason, wanted.finish_reason)
            self.values(f"log-probabilities of row {row} ({what})", result.logprobs, wanted.logprobs)

    def require_frequencies(
        self, what: str, results: Sequence[GenerationResult], shares: dict[tuple[int, ...], float]
    ) -> None:
        """Require completion frequencies to fit `shares`, up to a deviation with probability 1e-6."""
        statistic, bound = pearson(Counter(tuple(tokens_of(result)) for result in results), shares)
        self.require(
            statistic <= bound, f"Pearson's statistic of {what} is within chance", got=statistic, expected=bound
        )


def requests_of(
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int] | None = None,
    *,
    prefix: str = "",
    max_new_tokens: int = 4,
    session: bool = False,
    stop: Collection[int] = (END,),
    **sampling: Any,
) -> list[GenerationRequest]:
    """Return a request for each prompt, with ids `prefix` + row and seeds 0, 1, 2, ... by default.

    `session`: all are of one session. `sampling`: the other fields of `SamplingParams`.
    """
    params = SamplingParams(stop_token_ids=frozenset(stop), **sampling)
    return [
        GenerationRequest(
            f"{prefix}{row}", torch.tensor(prompt), seed, max_new_tokens, params, "session" if session else None
        )
        for row, (prompt, seed) in enumerate(zip(prompts, seeds or range(len(prompts)), strict=True))
    ]


def tokens_of(result: GenerationResult) -> list[int]:
    """Return the tokens of a completion."""
    tokens: list[int] = result.token_ids.tolist()
    return tokens


def specs_of(weights: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return what `begin_weight_update` announces of `weights`."""
    return {name: (tuple(weight.shape), weight.dtype) for name, weight in weights.items()}

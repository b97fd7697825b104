"""The embedded generation engine and plain ones pass the suite, and the suite catches every mutant."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlframework.base.errors import EngineNotReady, RefitError, RequestError
from rlframework.interfaces.generation import (
    GenerationEngine,
    GenerationRequest,
    GenerationResult,
    WeightReport,
    WeightSpan,
)
from rlframework.plugins.manager import create_manager
from rlframework.plugins.types import Capability
from rlframework_conformance import GenerationEngineSuite
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.proof import MutantProof

pytestmark = pytest.mark.slow


class TestGenerationEngine(GenerationEngineSuite):
    backend = "transformers"


class Row:
    """A request in progress."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request, self.ids, self.logprobs, self.versions = request, request.prompt_ids.tolist(), [], []
        self.dice, self.reason = np.random.default_rng(request.seed % 2**64), ""

    def result(self) -> GenerationResult:
        starts = [n for n, v in enumerate(self.versions) if n == 0 or v != self.versions[n - 1]]
        ends = [*starts[1:], len(self.versions)]
        spans = tuple(WeightSpan(a, b, self.versions[a]) for a, b in zip(starts, ends, strict=False))
        tokens = torch.tensor(self.ids[len(self.request.prompt_ids) :], dtype=torch.int64)
        return GenerationResult(self.request.request_id, tokens, torch.tensor(self.logprobs), self.reason, spans)


class PlainEngine(GenerationEngine):
    """Written from the interface alone: row by row, no cache, another random number generator; updates only."""

    paused = False

    def __init__(self, config, tokenizer, *, model_name, device, precision):
        self.model_name, self.dtype, self.vocabulary = model_name, getattr(torch, precision), len(tokenizer)
        self.model, self.version, self.specs, self.loaded = None, None, {}, {}
        self.rows: dict[str, Row] = {}
        self.positions = AutoModelForCausalLM.from_pretrained(model_name).config.max_position_embeddings

    def submit(self, requests):
        taken = set(self.rows)
        for request in requests:
            name, ids = request.request_id, request.prompt_ids
            if name in taken or len(ids) >= self.positions or int(ids.min()) < 0 or int(ids.max()) >= self.vocabulary:
                raise RequestError(f"request {name!r} is in use, too long, or has unknown tokens: {ids}")
            taken.add(name)
        self.rows |= {request.request_id: Row(request) for request in requests}

    def poll(self, timeout=0.0):
        ends = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while self.rows and not self.paused and not any(row.reason for row in self.rows.values()):
            self.step()
            if time.monotonic() >= ends:
                break
        done = [row for row in self.rows.values() if row.reason]
        for row in done:
            del self.rows[row.request.request_id]
        return [row.result() for row in done]

    def abort(self, request_ids):
        for name in self.rows.keys() & set(request_ids):
            self.rows[name].reason = "aborted"

    @torch.no_grad()
    def step(self):
        if self.version is None:
            raise EngineNotReady("there are no weights")
        seen: dict[Any, Any] = {}
        modes = [(part, part.training) for part in self.model.modules()]
        self.model.eval()
        for row in self.rows.values():
            self.draw_next(row, seen)
        for part, mode in modes:
            part.training = mode

    def draw_next(self, row, seen):
        sampling, key = row.request.sampling, (row.request.sampling.temperature, *row.ids)
        if key not in seen:
            logits = self.model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0, -1]
            seen[key] = torch.log_softmax(logits.double() / (sampling.temperature or 1.0), -1)
        logs = seen[key]
        token = int(logs.argmax()) if sampling.greedy else draw(logs, row.dice.random(), sampling)
        row.ids.append(token)
        row.logprobs.append(float(logs[token]))
        row.versions.append(self.version)
        longest = min(self.positions, len(row.request.prompt_ids) + row.request.max_new_tokens)
        row.reason = "stop" if token in sampling.stop_token_ids else "length" if len(row.ids) >= longest else ""

    def begin_weight_update(self, version, specs):
        self.model = self.version = None
        self.coming, self.specs, self.loaded = version, specs, {}
        self.module = AutoModelForCausalLM.from_pretrained(self.model_name, dtype=self.dtype)
        known = {name: tuple(tensor.shape) for name, tensor in self.module.state_dict().items()}
        tied = {"lm_head.weight"} if self.module.config.tie_word_embeddings else set()
        wrong = [name for name, (shape, _) in specs.items() if known.get(name) != tuple(shape)]
        if wrong or (missing := known.keys() - specs.keys() - tied):
            raise RefitError(f"the model has other weights than {wrong or missing}")

    def load_weights(self, weights):
        for name, tensor in weights:
            if self.specs.get(name) != (tuple(tensor.shape), tensor.dtype):
                raise RefitError(f"{name} was not announced like this")
            self.loaded[name] = tensor.clone()

    def finish_weight_update(self):
        if missing := self.specs.keys() - self.loaded.keys():
            raise RefitError(f"{sorted(missing)} have not arrived")
        self.module.load_state_dict(self.loaded, strict=False)
        self.module.tie_weights()
        self.model, self.version = self.module.eval(), self.coming
        return WeightReport(self.version)


class PlainEmbeddedEngine(PlainEngine):
    """The same in the trainer's process, where updates may come at any time."""

    def attach(self, model, version):
        self.model, self.version = model, version

    def pause(self, mode="keep"):
        self.paused = True
        if mode == "abort":
            self.abort(list(self.rows))

    def resume(self):
        self.paused = False


def draw(logs: Any, chance: float, sampling: Any) -> int:
    shares, tokens = logs.exp().sort(descending=True)
    shares = shares[: sampling.top_k] / shares[: sampling.top_k].sum()
    kept = shares[: int((shares.cumsum(0) < sampling.top_p).sum()) + 1]
    return int(tokens[min(int((kept.cumsum(0) <= chance * kept.sum()).sum()), len(kept) - 1)])


def passes() -> list[Any]:
    """The plain engine with all tests that it must pass, and the embedded one with those that this one need not."""
    record = create_manager().select("generation_engine", "transformers").record
    plain = replace(record, capabilities=frozenset())
    embedded = frozenset({Capability.EMBEDDED_GENERATION, Capability.IN_FLIGHT_UPDATE})
    tests = GenerationEngineSuite.tests()
    return [
        *((PlainEngine, plain, test) for test in GenerationEngineSuite.expected(plain, Layout(), "cpu")),
        *(
            (PlainEmbeddedEngine, replace(record, capabilities=embedded), test)
            for test, requirement in tests.items()
            if frozenset() < requirement.capabilities <= embedded
        ),
    ]


@pytest.mark.parametrize(("engine", "record", "test"), passes(), ids=lambda value: getattr(value, "__name__", None))
def test_a_plain_engine_passes(engine: type, record: Any, test: str, tmp_path: Path, conformance_models: Path) -> None:
    """The suite requires what the interface specifies, not how the core implements it."""
    where = {"manager": create_manager(), "device": "cpu", "folder": tmp_path, "models": conformance_models}
    getattr(GenerationEngineSuite(), test)(GenerationEngineSuite.open_harness(record, Layout(), **where, target=engine))


class TestMutants(MutantProof):
    kind = "generation_engine"
    backend = "transformers"

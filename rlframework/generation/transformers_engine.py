"""The embedded generation engine: a transformers causal language model with our own decoding loop.

Hugging Face `generate` supports neither per-row seeds, nor log-probabilities of the distribution before truncation, nor
prefilling a prompt once for a whole group. Not supported: paged caches, beam search. The cache takes the memory of
`batch_size` rows, on a GPU of as many as fit.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlframework.config.sections import GenerationConfig, TransformersGenerationConfig
from rlframework.generation.batch_memory import free_bytes, rows_that_fit
from rlframework.generation.decoding import Row, RowBatch
from rlframework.generation.engine_model import EngineModel
from rlframework.generation.packed_linears import PackedLinears
from rlframework.generation.probing import row_forward
from rlframework.generation.requests import ServingLimits, check_requests
from rlframework.generation.row_forward import PaddedRows, RowForward, WholeRows
from rlframework.generation.sessions import SessionPrefixes
from rlframework.huggingface.model_directories import read_config
from rlframework.interfaces.generation import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    Tag,
    WeightSpan,
)
from rlframework.weight_sync.buffers import WeightInfo
from rlframework.weight_sync.receiver import Held, ReceivesWeights, WeightSink

_PACKED_FROM = 8
"""Tokens of the longest completion from which packing the weights of linear layers costs less than it saves."""

_BEGIN_TOGETHER = 4
"""Waiting rows begin when 1 / `_BEGIN_TOGETHER` of the room is free: a forward of one prompt reads all weights too."""


@dataclass(eq=False)
class _Served:
    """An unfinished request and its row. `starts`: the first token of each weight version, and the version."""

    request: GenerationRequest
    row: Row
    starts: list[tuple[int, int]] = field(default_factory=list)

    def use(self, version: int, count: int) -> None:
        """Note that the tokens from `count` on are sampled with the weights of `version`."""
        if not self.starts or self.starts[-1][1] != version:
            self.starts.append((count, version))

    def spans(self) -> tuple[WeightSpan, ...]:
        """Return which tokens were sampled with which weights."""
        length = len(self.row.tokens)
        if not self.starts:
            return ()
        ends = [start for start, _ in self.starts[1:]] + [length]
        spans = (
            WeightSpan(start, min(end, length), version)
            for (start, version), end in zip(self.starts, ends, strict=True)
        )
        return tuple(span for span in spans if span.start < span.end)


class _Kind(NamedTuple):
    """The rows that can be decoded together: `length` is their regime, or their length where that must be equal."""

    sampling: SamplingParams
    length: int
    version: int


class TransformersEngine(ReceivesWeights):
    """See `GenerationEngine`. An attached model keeps its dtype and device."""

    def __init__(
        self,
        config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model_name: str,
        device: str,
        precision: str,
    ) -> None:
        own = config if isinstance(config, TransformersGenerationConfig) else TransformersGenerationConfig()
        self._config, self._model_name, self._keep_caches = config, model_name, own.cache_after_update == "keep"
        self._pad_id = int(tokenizer.pad_token_id)
        self._engine_model = EngineModel(model_name, device, precision)
        self.refit_device, self.refit_deadline = torch.device(device), config.refit.deadline
        self._model: Any = None
        self._forwards: type[RowForward] = PaddedRows
        self._probed_config: Any = None
        self._linears = PackedLinears()
        self._limits: ServingLimits | None = None
        self._served: dict[str, _Served] = {}
        self._waiting: dict[str, _Served] = {}  # those in no batch, in the order in which they begin
        self._batches: list[tuple[_Kind, RowBatch]] = []
        self._sessions = SessionPrefixes(own.session_cache_tokens)
        self._results: list[GenerationResult] = []
        self._paused = False
        self._updated = False  # the weights, since the last step

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `GenerationEngine.submit`. Requests submitted together are served in the order of their lengths.

        If a prompt leaves fewer than `max_new_tokens` of the model's positions, its completion gets the remaining ones.
        """
        limits = self._limits = self._limits or ServingLimits.of(read_config(self._model_name))
        check_requests(requests, limits, self._served.keys())
        for request in sorted(requests, key=lambda request: (len(request.prompt_ids), request.prompt_ids.tolist())):
            name, session = request.request_id, request.session_id
            row = Row(name, request.prompt_ids, request.seed, limits.budget(request), keep_prefix=session is not None)
            self._served[name] = self._waiting[name] = _Served(request, row)

    def poll(self, timeout: float | None = 0.0) -> list[GenerationResult]:
        """See `GenerationEngine.poll`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._served and not self._paused and not self._results:
            version = self.weight_state.require()
            worthwhile = max(served.row.left for served in self._served.values()) >= _PACKED_FROM
            with _evaluating(self._model), self._linears.used(self._model, pack=worthwhile):
                while not self._results:
                    self._admit(version)
                    self._step(version)
                    if deadline is not None and time.monotonic() >= deadline:
                        break
        results, self._results = self._results, []
        return results

    def abort(self, request_ids: Collection[str]) -> None:
        """See `GenerationEngine.abort`."""
        ending = [name for name in dict.fromkeys(request_ids) if name in self._served]
        self._withdraw(set(ending))
        for name in ending:
            self._finish(name, "stop" if self._served[name].row.ended else "aborted")

    def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        """See `GenerationEngine.pause`."""
        self._paused = True
        if mode == "abort":
            self.abort(list(self._served))

    def resume(self) -> None:
        """See `GenerationEngine.resume`."""
        self._paused = False

    # -- serving -------------------------------------------------------------------------------------------------------

    def _admit(self, version: int) -> None:
        """Begin waiting requests, the first and those that can be decoded with it, as long as there is room."""
        while self._waiting and (active := self._active()) < self._config.batch_size:
            kind = self._kind(next(iter(self._waiting.values())), version)
            alike = [served for served in self._waiting.values() if self._kind(served, version) == kind]
            room = self._room(alike, active)
            if room < max(1, min(len(alike), (active + room) // _BEGIN_TOGETHER)):
                return
            chosen = alike[:room]
            for served in chosen:
                self._find_prefix(served, version)
            self._add(kind, [served.row for served in chosen])
            for served in chosen:
                served.use(version, len(served.row.tokens))
                del self._waiting[served.row.name]

    def _find_prefix(self, served: _Served, version: int) -> None:
        served.row.prefix = None
        if (session := served.request.session_id) is not None:
            served.row.prefix = self._sessions.find(session, version, served.row.ids)

    def _add(self, kind: _Kind, rows: list[Row]) -> None:
        for other, batch in self._batches:
            if other == kind and not self._forwards.equal_lengths and batch.add(rows):
                return
        device = next(self._model.parameters()).device
        batch = RowBatch(self._forwards(self._model, self._pad_id, device), kind.sampling, device)
        batch.add(rows)
        self._batches.append((kind, batch))

    def _step(self, version: int) -> None:
        """Give each active row a token."""
        updated, self._updated = self._updated, False
        for kind, batch in self._batches:
            if updated and kind.version != version:  # caches are kept
                batch.use(self._model)
                for row, count in batch.counts():
                    self._served[row.name].use(version, count)
            for row in batch.step():
                self._finish(row.name, "stop" if row.ended else "length")
        self._batches = [(kind, batch) for kind, batch in self._batches if len(batch)]

    def _finish(self, name: str, reason: FinishReason) -> None:
        served = self._served.pop(name)
        self._waiting.pop(name, None)
        request, row = served.request, served.row
        self._results.append(GenerationResult(name, row.tokens, row.logprobs, reason, served.spans()))
        same_weights = len(served.starts) == 1 and reason != "aborted"
        if request.session_id is not None and row.prefix is not None and same_weights:
            self._sessions.store(request.session_id, served.starts[0][1], row.ids[:-1], row.prefix)

    def _kind(self, served: _Served, version: int) -> _Kind:
        assert self._limits is not None
        row, rows = served.row, self._limits.rows
        alike = len(row.prompt) + len(row.tokens) if self._forwards.equal_lengths else rows.regime(len(row.prompt))
        return _Kind(served.request.sampling, alike, version)

    def _active(self) -> int:
        """Return the number of rows that are decoded."""
        return sum(len(batch) for _, batch in self._batches)

    def _room(self, waiting: list[_Served], active: int) -> int:
        """Return how many of `waiting` can begin now: up to `batch_size` rows in all, on a GPU those that fit."""
        room, weight = self._config.batch_size - active, next(self._model.parameters())
        if room <= 0 or (free := free_bytes(weight.device)) is None:
            return max(0, room)
        total = max(len(served.row.prompt) + served.row.budget for served in waiting)
        prompt = total if self._forwards is WholeRows else max(len(served.row.ids) for served in waiting)
        sizes = {"prompt": prompt, "total": total, "width": weight.element_size()}
        fit = rows_that_fit(free, self._model.config, truncated=waiting[0].request.sampling.truncated, **sizes)
        if active:
            return min(room, fit if fit > 1 else 0)  # it says 1 even if there is no room, to serve some row at all
        most = min(room, fit)
        return -(-len(waiting) // -(-len(waiting) // most))  # in batches of nearly equal size

    def _withdraw(self, names: Collection[str]) -> list[_Served]:
        """Take the active ones of these requests out of their batches, and return them."""
        withdrawn: list[_Served] = []
        for _, batch in self._batches:
            rows = [row for row in batch.rows if row.name in names]
            batch.remove(rows)
            withdrawn += [self._served[row.name] for row in rows]
        self._batches = [(kind, batch) for kind, batch in self._batches if len(batch)]
        return withdrawn

    # -- weights and memory --------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module, version: int) -> None:
        """See `GenerationEngine.attach`. Keeps the mode (training or evaluation) of each module.

        The first time, finds out on a tiny model how rows can be decoded together; raises `NotSupported` if in no way.
        """
        self._use(model)
        self.drop_caches()
        self.weight_state.commit(version)

    def use_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Held | None:
        """See `ReceivesWeights.use_weights`. The first call builds the engine's own module, in its precision."""
        self._model = None
        self._use(self._engine_model.load(weights))
        return None

    def refit_sink(self, info: WeightInfo) -> WeightSink:
        """See `ReceivesWeights.refit_sink`. Writes into the engine's own module, in place if it has one."""
        self._model = None
        return self._engine_model.sink(info, self._use)

    def drop_caches(self) -> int:
        """See `ReceivesWeights.drop_caches`. Keeps the caches of active requests if `cache_after_update` is keep."""
        self._linears.drop()
        recomputed = 0 if self._keep_caches else self._preempt()
        return self._sessions.drop() + recomputed

    def release(self, tags: Collection[Tag] = ("weights", "kv_cache")) -> int:
        """See `GenerationEngine.release`. Frees caches, and packed copies of weights, but not the weights themselves.

        Active requests are computed again when they go on. Returns the cache's memory to the GPU, for other processes.
        """
        freed = self._linears.drop()
        if "kv_cache" in tags:
            self._preempt()
            freed += self._sessions.bytes
            self._sessions.drop()
        if self.refit_device.type == "cuda":
            torch.cuda.empty_cache()
        return freed

    def close(self) -> None:
        """See `GenerationEngine.close`."""
        self._linears.drop()
        self._served, self._waiting, self._batches, self._model = {}, {}, [], None

    def _preempt(self) -> int:
        """Have all active requests begin again, with the tokens that they have; return the tokens that had caches."""
        preempted = self._withdraw(self._served.keys())
        for served in preempted:
            if served.row.ended:
                self._finish(served.row.name, "stop")
        again = {served.row.name: served for served in preempted if not served.row.ended}
        self._waiting = again | self._waiting
        return sum(len(served.row.ids) for served in preempted)

    def _use(self, model: nn.Module) -> None:
        if model.config is not self._probed_config:
            self._forwards, self._probed_config = row_forward(model), model.config
            self._limits = ServingLimits.of(model.config)
        self._model, self._updated = model, True


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode, and restore the mode of each module afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True

"""The embedded generation engine: a transformers causal language model with our own decoding loop.

Hugging Face `generate` supports neither per-row seeds, nor log-probabilities of the distribution before truncation, nor
prefilling a prompt once for a whole group. Not supported: paged caches, beam search. The cache takes the memory of
`batch_size` rows, on a GPU of as many as fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlframework.config.sections import GenerationConfig
from rlframework.generation.sdk import (
    EngineModel,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Held,
    ImageEncoder,
    Media,
    PackedLinears,
    SamplingParams,
    Served,
    ServingEngine,
    ServingLimits,
    Tag,
    WeightInfo,
    WeightSink,
    never_sampled,
)
from rlframework_transformers.cache import free_bytes, rows_that_fit
from rlframework_transformers.decoding import Row, RowBatch
from rlframework_transformers.key_values import SessionPrefixes
from rlframework_transformers.media_rows import MediaRows, no_media
from rlframework_transformers.plugin import TransformersGenerationConfig
from rlframework_transformers.probing import row_forward
from rlframework_transformers.row_forward import PaddedRows, RowForward, WholeRows

_PACKED_FROM = 8
"""Tokens of the longest completion from which packing the weights of linear layers costs less than it saves."""

_BEGIN_TOGETHER = 4
"""Waiting rows begin when 1 / `_BEGIN_TOGETHER` of the room is free: a forward of one prompt reads all weights too."""


@dataclass(eq=False)
class _Served(Served):
    """An unfinished request and its row."""

    row: Row

    def completion(self) -> tuple[Tensor, Tensor]:
        """See `Served.completion`."""
        return self.row.tokens, self.row.logprobs

    def result(self, reason: FinishReason) -> GenerationResult:
        """See `Served.result`. A row that ended with a stop token has stopped, even if it is aborted now."""
        return super().result("stop" if self.row.ended else reason)


class _Kind(NamedTuple):
    """The rows that can be decoded together: `length` is their regime, or their length where that must be equal."""

    sampling: SamplingParams
    length: int
    version: int
    media: bool


class TransformersEngine(ServingEngine[_Served]):
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
        super().__init__(config, tokenizer, model_name=model_name, device=device, precision=precision)
        self._keep_caches = own.cache_after_update == "keep"
        self._pad_id = int(tokenizer.pad_token_id)
        self._engine_model = EngineModel(model_name, device, precision)
        self._model: Any = None
        self._forwards: type[RowForward] = PaddedRows
        self._probed_config: Any = None
        self._never: list[int] = []  # tokens that stand for features of images
        self._linears = PackedLinears()
        self._batches: list[tuple[_Kind, RowBatch]] = []  # of the requests that do not wait
        self._sessions = SessionPrefixes(own.session_cache_tokens)
        self._encoder = ImageEncoder()
        self._updated = False  # the weights, since the last step

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `ServingEngine.submit`. Requests submitted together are served in the order of their lengths."""
        super().submit(sorted(requests, key=lambda request: (len(request.prompt_ids), request.prompt_ids.tolist())))

    def accepted(self, request: GenerationRequest) -> _Served:
        """See `ServingEngine.accepted`."""
        name, session, budget = request.request_id, request.session_id, self.limits.budget(request)
        row = Row(name, request.prompt_ids, request.seed, budget)
        row.media = Media.of(request.media) if request.media else None
        row.keep_prefix = session is not None and row.media is None  # a prefix does not tell of which images it is
        return _Served(request, row)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """See `ServingEngine.serving`."""
        worthwhile = max(served.row.left for served in self._served.values()) >= _PACKED_FROM
        with _evaluating(self._model), self._linears.used(self._model, pack=worthwhile):
            yield

    # -- serving -------------------------------------------------------------------------------------------------------

    def _admit(self, version: int) -> None:
        """Begin waiting requests, the first and those that can be decoded with it, as long as there is room."""
        self._encoder.use(self._model, version)
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
        if (session := served.request.session_id) is not None and served.row.keep_prefix:
            served.row.prefix = self._sessions.find(session, version, served.row.ids)

    def _add(self, kind: _Kind, rows: list[Row]) -> None:
        joinable = kind.media or not self._forwards.equal_lengths
        for other, batch in self._batches:
            if other == kind and joinable and batch.add(rows):
                return
        device = next(self._model.parameters()).device
        batch = RowBatch(self._forward_of(kind, device), kind.sampling, device, self._never)
        batch.add(rows)
        self._batches.append((kind, batch))

    def _forward_of(self, kind: _Kind, device: torch.device) -> RowForward:
        if kind.media:
            return MediaRows(self._model, self._pad_id, device, self._encoder)
        return self._forwards(self._model, self._pad_id, device)

    def step(self, version: int) -> bool:
        """See `ServingEngine.step`. Gives each active row a token."""
        self._admit(version)
        updated, self._updated = self._updated, False
        for kind, batch in self._batches:
            if updated and kind.version != version:  # caches are kept
                batch.use(self._model)
                for row, count in batch.counts():
                    self._served[row.name].use(version, count)
            for row in batch.step():
                self.finish(row.name, "length")
        self._batches = [(kind, batch) for kind, batch in self._batches if len(batch)]
        return True

    def finish(self, name: str, reason: FinishReason) -> _Served:
        """See `ServingEngine.finish`. Keeps the row's cache for the next request of its session."""
        served = super().finish(name, reason)
        request, row = served.request, served.row
        same_weights = len(served.starts) == 1 and (row.ended or reason != "aborted")
        if request.session_id is not None and row.prefix is not None and same_weights:
            self._sessions.store(request.session_id, served.starts[0][1], row.ids[:-1], row.prefix)
        return served

    def _kind(self, served: _Served, version: int) -> _Kind:
        row, rows = served.row, self.limits.rows
        equal = self._forwards.equal_lengths and row.media is None
        alike = len(row.prompt) + len(row.tokens) if equal else rows.regime(len(row.prompt))
        return _Kind(served.request.sampling, alike, version, row.media is not None)

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

    def withdraw(self, names: Collection[str]) -> list[_Served]:
        """See `ServingEngine.withdraw`. Returns their records."""
        names = set(names)
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
        preempted = self.withdraw(self._served.keys())
        for served in preempted:
            if served.row.ended:
                self.finish(served.row.name, "stop")
        again = {served.row.name: served for served in preempted if not served.row.ended}
        self._waiting = again | self._waiting
        return sum(len(served.row.ids) for served in preempted)

    def _use(self, model: nn.Module) -> None:
        if model.config is not self._probed_config:
            self._forwards, self._probed_config = row_forward(model), model.config
            self.limits = replace(ServingLimits.of(model.config), no_media=self._no_media(model))
            self._never = never_sampled(model.config)
        self._model, self._updated = model, True

    def _no_media(self, model: Any) -> str | None:
        if self._forwards.equal_lengths:
            return f"rows of {type(model).__name__} with and without padding differ, which images do not allow"
        return no_media(model)


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

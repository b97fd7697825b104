"""The embedded generation engine: a transformers causal language model with our own decoding loop.

Hugging Face `generate` supports neither per-row seeds, nor log-probabilities of the distribution before truncation, nor
prefilling a prompt once for a whole group. Not supported: paged caches, beam search. The cache takes the memory of
`batch_size` rows, on a GPU of as many as fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlframework.config.sections import GenerationConfig
from rlframework.generation.batch_memory import free_bytes, rows_that_fit
from rlframework.generation.decode import Completion, complete, row_uniforms
from rlframework.generation.engine_model import EngineModel
from rlframework.generation.probing import row_forward
from rlframework.generation.requests import ServingLimits, check_requests
from rlframework.generation.row_forward import PaddedRows, RowForward, WholeRows
from rlframework.huggingface.model_directories import read_config
from rlframework.interfaces.generation import FinishReason, GenerationRequest, GenerationResult, Tag, WeightSpan
from rlframework.weight_sync.buffers import WeightInfo
from rlframework.weight_sync.receiver import Held, ReceivesWeights, WeightSink


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
        self._config, self._model_name = config, model_name
        self._pad_id = int(tokenizer.pad_token_id)
        self._engine_model = EngineModel(model_name, device, precision)
        self.refit_device, self.refit_deadline = torch.device(device), config.refit.deadline
        self._model: Any = None
        self._forwards: type[RowForward] = PaddedRows
        self._probed_config: Any = None
        self._limits: ServingLimits | None = None
        self._waiting: dict[str, GenerationRequest] = {}
        self._results: list[GenerationResult] = []
        self._paused = False

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `GenerationEngine.submit`.

        If a prompt leaves fewer than `max_new_tokens` of the model's positions, its completion gets the remaining ones.
        """
        self._limits = self._limits or ServingLimits.of(read_config(self._model_name))
        check_requests(requests, self._limits, self._waiting.keys())
        self._waiting |= {request.request_id: request for request in requests}

    def poll(self, timeout: float | None = 0.0) -> list[GenerationResult]:
        """See `GenerationEngine.poll`."""
        if self._waiting and not self._paused and not self._results:
            version = self.weight_state.require()
            with _evaluating(self._model):
                self._serve(self._next_batch(), version)
        results, self._results = self._results, []
        return results

    def abort(self, request_ids: Collection[str]) -> None:
        """See `GenerationEngine.abort`."""
        for name in request_ids:
            if (request := self._waiting.pop(name, None)) is not None:
                empty = Completion(torch.empty(0, dtype=torch.int64), torch.empty(0), True)
                self._finish(request, empty, "aborted", ())

    def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        """See `GenerationEngine.pause`."""
        self._paused = True
        if mode == "abort":
            self.abort(list(self._waiting))

    def resume(self) -> None:
        """See `GenerationEngine.resume`."""
        self._paused = False

    def _next_batch(self) -> list[GenerationRequest]:
        """Return requests that can be decoded together, of similar length, equal prompts adjacent."""
        first = next(iter(self._waiting.values()))
        alike = [request for request in self._waiting.values() if self._kind(request) == self._kind(first)]
        alike.sort(key=lambda request: (len(request.prompt_ids), request.prompt_ids.tolist()))
        return alike[: self._batch_size(alike)]

    def _kind(self, request: GenerationRequest) -> tuple[Any, ...]:
        length = len(request.prompt_ids)
        assert self._limits is not None
        return request.sampling, length if self._forwards.equal_lengths else self._limits.rows.regime(length)

    def _serve(self, requests: list[GenerationRequest], version: int) -> None:
        assert self._limits is not None
        sampling = requests[0].sampling
        prompts = [request.prompt_ids for request in requests]
        budgets = torch.tensor([self._limits.budget(request) for request in requests])
        seeds = torch.tensor([request.seed for request in requests])
        uniforms = row_uniforms(seeds, 0 if sampling.greedy else int(budgets.max()))
        ends = torch.tensor(sorted(sampling.stop_token_ids), dtype=torch.int64)
        done = complete(self._model, prompts, uniforms, budgets, ends, sampling, self._pad_id, self._forwards)
        for request, completion in zip(requests, done, strict=True):
            del self._waiting[request.request_id]
            spans = (WeightSpan(0, len(completion.tokens), version),)
            self._finish(request, completion, "length" if completion.truncated else "stop", spans)

    def _finish(
        self,
        request: GenerationRequest,
        completion: Completion,
        reason: FinishReason,
        spans: tuple[WeightSpan, ...],
    ) -> None:
        result = GenerationResult(request.request_id, completion.tokens, completion.logprobs, reason, spans)
        self._results.append(result)

    def _batch_size(self, requests: list[GenerationRequest]) -> int:
        """Return the rows to decode together: `batch_size`, or on a GPU fewer, in batches of equal size that fit."""
        most, weight = self._config.batch_size, next(self._model.parameters())
        if (free := free_bytes(weight.device)) is None:
            return most
        assert self._limits is not None
        prompt = max(len(request.prompt_ids) for request in requests)
        total = max(len(request.prompt_ids) + self._limits.budget(request) for request in requests)
        prompt = total if self._forwards is WholeRows else prompt  # the tokens of the largest forward
        sizes = {"prompt": prompt, "total": total, "width": weight.element_size()}
        truncated = requests[0].sampling.truncated
        most = min(most, rows_that_fit(free, self._model.config, truncated=truncated, **sizes))
        return -(-len(requests) // -(-len(requests) // most))

    # -- weights and memory --------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module, version: int) -> None:
        """See `GenerationEngine.attach`. Keeps the mode (training or evaluation) of each module.

        The first time, finds out on a tiny model how rows can be decoded together; raises `NotSupported` if in no way.
        """
        self._use(model)
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

    def release(self, tags: Collection[Tag] = ("weights", "kv_cache")) -> int:
        """See `GenerationEngine.release`. Returns the cache's memory to the GPU, for other processes."""
        if self.refit_device.type == "cuda":
            torch.cuda.empty_cache()
        return 0

    def _use(self, model: nn.Module) -> None:
        if model.config is not self._probed_config:
            self._forwards, self._probed_config = row_forward(model), model.config
            self._limits = ServingLimits.of(model.config)
        self._model = model


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

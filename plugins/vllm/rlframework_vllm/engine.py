"""The generation engine `vllm`: interface version 2 on vLLM's engine in this process."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from rlframework.config.sections import GenerationConfig
from rlframework.errors import EngineNotReady, RequestError, UserError
from rlframework.generation.requests import ServingLimits, check_requests
from rlframework.generation.row_limits import RowLimits
from rlframework.huggingface.model_directories import read_config
from rlframework.interfaces.generation import FinishReason, GenerationRequest, GenerationResult, Tag, WeightSpan
from rlframework.weight_sync.buffers import WeightInfo
from rlframework.weight_sync.receiver import Held, ReceivesWeights, WeightSink
from rlframework_vllm import weights
from rlframework_vllm.checks import TEMPERATURES, default_cache_bytes
from rlframework_vllm.config import VllmGenerationConfig, VllmKeys
from rlframework_vllm.runtime import Runtime

_BLOCK = 32  # tokens per block of the cache on a CPU: the smallest size that its kernels like
_FORWARD = 4096  # tokens of a forward on a CPU


@dataclass
class _Row:
    """A request that is served. `starts`: the first token of each version of the weights."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)

    def result(self, reason: FinishReason) -> GenerationResult:
        versions, starts = self.starts.keys(), list(self.starts.values())
        spans = map(WeightSpan, starts, [*starts[1:], len(self.tokens)], versions)
        tokens, logprobs = torch.tensor(self.tokens, dtype=torch.int64), torch.tensor(self.logprobs)
        return GenerationResult(self.request.request_id, tokens, logprobs, reason, tuple(spans))


class VllmEngine(ReceivesWeights):
    """See `GenerationEngine`. vLLM starts at the first update of the weights."""

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
        self._keys = config.vllm if isinstance(config, VllmGenerationConfig) else VllmKeys()
        self.refit_device, self.refit_deadline = torch.device(device), config.refit.deadline
        self._rows: dict[str, _Row] = {}
        self._new: dict[str, None] = {}  # the rows that vLLM does not have yet
        self._results: list[GenerationResult] = []
        self._paused = False
        self._sink: weights.StagedWeights | None = None
        self._started: Runtime | None = None
        self._asleep: set[Tag] = set()

    # -- requests ------------------------------------------------------------------------------------------------------

    @cached_property
    def _limits(self) -> ServingLimits:
        found, most = ServingLimits.of(read_config(self._model_name)), self._keys.max_model_len
        if most is None:
            return found
        return ServingLimits(RowLimits((*(one for one in found.rows.bounds if one < most), most)), found.vocabulary)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `GenerationEngine.submit`.

        If a prompt leaves fewer than `max_new_tokens` of the model's positions, its completion gets the remaining ones.
        """
        check_requests(requests, self._limits, self._rows)
        low, high = TEMPERATURES
        for request in requests:
            name, given = request.request_id, request.sampling.temperature
            if given and not low <= given <= high:
                raise RequestError(f"request {name!r} has temperature={given:g}; vLLM takes 0 and {low:g} to {high:g}")
        self._rows |= {request.request_id: _Row(request) for request in requests}
        self._new |= dict.fromkeys(request.request_id for request in requests)

    def poll(self, timeout: float | None = 0.0) -> list[GenerationResult]:
        """See `GenerationEngine.poll`. A forward is not interrupted when the time has passed."""
        end = None if timeout is None else time.monotonic() + timeout
        advanced = False
        while self._rows and not self._paused and not self._results:
            if advanced and end is not None and time.monotonic() >= end:
                break
            advanced |= self._step(self.weight_state.require())
        results, self._results = self._results, []
        return results

    def abort(self, request_ids: Collection[str]) -> None:
        """See `GenerationEngine.abort`."""
        for name in [name for name in dict.fromkeys(request_ids) if name in self._rows]:
            if name in self._new:
                del self._new[name]
            else:
                self._vllm.abort([name])
            self._results.append(self._rows.pop(name).result("aborted"))

    def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        """See `GenerationEngine.pause`. Requests that go on with new weights compute their caches again."""
        self._paused = True
        if mode == "abort":
            self.abort(list(self._rows))

    def resume(self) -> None:
        """See `GenerationEngine.resume`."""
        self._paused = False

    def _step(self, version: int) -> bool:
        """Compute one forward with the weights of `version`; return whether there are new tokens."""
        if self._asleep:
            raise EngineNotReady(f"the memory of {', '.join(sorted(self._asleep))} was released: call restore first")
        for name in list(self._new):
            request, vocabulary = self._rows[name].request, self._limits.vocabulary or 2**31 - 1
            top_k = min(request.sampling.top_k or 0, vocabulary)
            self._vllm.add(request, self._limits.budget(request), top_k)
            del self._new[name]
        advanced = False
        for name, tokens, logprobs, reason in self._vllm.step():
            row = self._rows[name]
            row.starts.setdefault(version, len(row.tokens))
            row.tokens += tokens
            row.logprobs += logprobs
            advanced |= bool(tokens)
            if reason is not None:
                self._results.append(self._rows.pop(name).result(reason))
        return advanced

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def _vllm(self) -> Runtime:
        if self._started is None:
            self._started = Runtime(**self._arguments())
        return self._started

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of vLLM's `EngineArgs`."""
        cpu, config = self.refit_device.type == "cpu", read_config(self._model_name)
        defaults: dict[str, Any] = {"enforce_eager": cpu}
        if cpu:
            cache = default_cache_bytes(config.get_text_config().to_dict(), self._precision, self._keys.max_model_len)
            tokens = [one for one in self._limits.rows.bounds if one < math.inf]
            tokens += [_FORWARD, self._config.batch_size]  # whole prompts, as generators of a CPU take no number back
            defaults |= {"enable_chunked_prefill": False, "max_num_batched_tokens": int(max(tokens))}
            defaults |= {"block_size": _BLOCK, "kv_cache_memory_bytes": cache}
        return {
            **defaults,
            **self._keys.given(),
            "model": self._model_name,
            "dtype": self._precision,
            "max_num_seqs": self._config.batch_size,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "async_scheduling": False,
            "logprobs_mode": "raw_logprobs",
            "disable_log_stats": True,
            "enable_sleep_mode": not cpu,
        }

    def refit_sink(self, info: WeightInfo) -> WeightSink:
        """See `ReceivesWeights.refit_sink`. The first time, vLLM starts."""
        if self._sink is None or self._sink.info != info:
            weights.require_fit(info, read_config(self._model_name))
            several = self._keys.tensor_parallel_size > 1
            self._sink = weights.StagedWeights(info, self.refit_device, self._load, several=several)
        sink, self._started = self._sink, self._vllm
        if self.refit_device.type == "cuda":
            self._sink = None  # its memory is another copy of the weights
        return sink

    def _load(self, source: weights.Source) -> Held:
        if self._keys.tensor_parallel_size > 1:
            self._vllm.call(weights.load_shard, source)
            return {}
        (held,) = self._vllm.call(weights.load, source)
        found: Held = held
        return found

    def drop_caches(self) -> int:
        """See `ReceivesWeights.drop_caches`."""
        return self._vllm.drop_caches()

    # -- memory --------------------------------------------------------------------------------------------------------

    def release(self, tags: Collection[Tag] = ("weights", "kv_cache")) -> int:
        """See `GenerationEngine.release`. On a CPU nothing is freed; on a GPU the cache goes with the weights."""
        if self.refit_device.type == "cpu" or self._started is None or self._asleep >= set(tags):
            return 0
        if self._rows:
            raise UserError(f"{len(self._rows)} requests are unfinished: abort them before release")
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

    def close(self) -> None:
        """See `GenerationEngine.close`."""
        runtime, self._started, self._sink = self._started, None, None
        if runtime is not None:
            self.weight_state.fail("the engine was closed")
            runtime.close()

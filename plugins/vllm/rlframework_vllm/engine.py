"""The generation engine `vllm`: interface version 2 on vLLM's engine in this process."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import Any

from rlframework.generation.sdk import (
    AdaptedWeights,
    Collected,
    GenerationRequest,
    Held,
    ServingLimits,
    SleepingEngine,
    Source,
    StagedWeights,
    WeightInfo,
    WeightReport,
    WeightSink,
    never_sampled,
    require_fit,
)
from rlframework_vllm import weight_loading
from rlframework_vllm.checks import BLOCK, KINDS, TEMPERATURES, default_cache_bytes
from rlframework_vllm.config import VllmGenerationConfig, VllmKeys
from rlframework_vllm.runtime import Runtime

_FORWARD = 4096  # tokens of a forward on a CPU


class VllmEngine(SleepingEngine[Collected]):
    """See `GenerationEngine`. vLLM starts at the first update of the weights."""

    _sink: StagedWeights | None = None
    _started: Runtime | None = None
    _start_seconds: float = 0.0
    """The seconds that the start took, until they are reported."""

    @cached_property
    def _keys(self) -> VllmKeys:
        return self._config.vllm if isinstance(self._config, VllmGenerationConfig) else VllmKeys()

    @cached_property
    def _weights(self) -> AdaptedWeights:
        return AdaptedWeights(self._model_name, self._precision, self.refit_device, self._whole)

    # -- requests ------------------------------------------------------------------------------------------------------

    @cached_property
    def limits(self) -> ServingLimits:
        """See `ServingEngine.limits`."""
        limits = ServingLimits.of(self.model_config, self._keys.max_model_len, KINDS)
        return replace(limits, temperatures=TEMPERATURES)

    def accepted(self, request: GenerationRequest) -> Collected:
        """See `ServingEngine.accepted`."""
        return self.collected(request)

    def step(self, version: int) -> bool:
        """See `ServingEngine.step`. Computes one forward."""
        self.restore()
        for name, served in list(self._waiting.items()):
            budget, top_k = self.limits.budget(served.request), self.limits.top_k(served.request)
            self._vllm.add(served.request, budget, top_k, version, served.places)
            del self._waiting[name]
        advanced = False
        for name, tokens, logprobs, reason, prompt in self._vllm.step():
            self._served[name].add(version, tokens, logprobs)
            advanced |= bool(tokens)
            if reason is not None:
                self.finish(name, reason).require_prompt(prompt)
        return advanced

    def withdraw(self, names: Collection[str]) -> None:
        """See `ServingEngine.withdraw`."""
        if names:
            self._vllm.abort(names)

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def _vllm(self) -> Runtime:
        if self._started is None:
            begun = time.perf_counter()
            self._started = Runtime(**self._arguments())
            self._start_seconds = time.perf_counter() - begun
        return self._started

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of `Runtime`."""
        cpu, forward = self.refit_device.type == "cpu", 0
        defaults: dict[str, Any] = {"enforce_eager": cpu}
        if cpu:
            sizes = self.model_config.get_text_config().to_dict()
            cache = default_cache_bytes(sizes, self._precision, self._keys.max_model_len)
            tokens = [one for one in self.limits.rows.bounds if one < math.inf]
            tokens += [_FORWARD, self._config.batch_size]  # whole prompts, as generators of a CPU take no number back
            defaults |= {"enable_chunked_prefill": False, "max_num_batched_tokens": (forward := int(max(tokens)))}
            defaults |= {"block_size": BLOCK, "kv_cache_memory_bytes": cache}
        if self.limits.no_media is None:
            features = forward * self._config.batch_size  # of all rows: without room for them vLLM divides prompts
            defaults |= {"images": (self.model_config.architectures[0], features)}
            defaults |= {"never": never_sampled(self.model_config)}
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
        self.restore(["weights"])
        return self._weights.sink(info)

    def _whole(self, info: WeightInfo) -> WeightSink:
        """Return the destination of whole weights."""
        if self._sink is None or self._sink.info != info:
            require_fit(info, self.model_config, self._model_name)
            several = self._keys.tensor_parallel_size > 1
            self._sink = StagedWeights(info, self.refit_device, self._load, several=several)
        sink, self._started = self._sink, self._vllm
        if self.refit_device.type == "cuda":
            self._sink = None  # its memory is another copy of the weights
        return sink

    def _load(self, source: Source) -> Held:
        load = weight_loading.load_shard if self._keys.tensor_parallel_size > 1 else weight_loading.load
        held: Held = self._vllm.call(load, source)[0] or {}
        return held

    def finish_weight_update(self) -> WeightReport:
        """See `GenerationEngine.finish_weight_update`."""
        report = replace(super().finish_weight_update(), start_seconds=self._start_seconds)
        self._start_seconds = 0.0
        return report

    def drop_caches(self) -> int:
        """See `ReceivesWeights.drop_caches`."""
        return self._vllm.drop_caches()

    def close(self) -> None:
        """See `GenerationEngine.close`."""
        runtime, self._started, self._sink = self._started, None, None
        if runtime is not None:
            self.weight_state.fail("the engine was closed")
            runtime.close()

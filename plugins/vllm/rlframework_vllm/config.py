"""The section `generation` for vLLM: `generation.vllm` has keys of `EngineArgs`. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from rlframework.config.base import NeedsTrust, Section
from rlframework.config.numbers import Count, Fraction, Tokens, Workers
from rlframework.config.sections import GenerationConfig

Bytes = Annotated[int, Field(gt=0, le=10**14)]

_REASONS: Mapping[str, str] = {
    "policy.model_name decides": "model",
    "policy.precision and generation.refit.dtype decide": "dtype",
    "generation.batch_size decides": "max_num_seqs",
    "generation.workers.num_workers decides": "data_parallel_size",
    "each request has its own seed": "seed",
    "requests say how to sample": "generation_config override_generation_config",
    "requests are tokens, so the engine loads no tokenizer": "tokenizer skip_tokenizer_init",
    "each sampled token has the log-probability that the loss needs": "logprobs_mode max_logprobs logits_processors",
    "weights arrive by refits": "load_format",
    "adapters are merged into the weights": "enable_lora",
    "it follows from tensor_parallel_size": "distributed_executor_backend",
    "the engine works only inside `poll`": "async_scheduling",
    "on a CPU, vLLM cannot sample for prompts that it splits": "enable_chunked_prefill",
    "it is on for GPUs, as `release` needs it": "enable_sleep_mode",
    "it is not supported": "pipeline_parallel_size quantization speculative_config",
    "images are processed before they are sent to the engine": "mm_processor_kwargs mm_processor_cache_gb "
    "mm_device_do_normalize skip_mm_profiling limit_mm_per_prompt enable_mm_embeds language_model_only",
    "it loads code": "trust_remote_code worker_cls worker_extension_cls",
}
OWNED: Mapping[str, str] = {key: reason for reason, keys in _REASONS.items() for key in keys.split()}
"""Keys of vLLM that this plugin decides, and how."""


class VllmKeys(Section):
    """Keys of vLLM, under its own names; null: vLLM's default."""

    tensor_parallel_size: Workers = Field(1, description="GPUs of an engine, between which each layer is sharded")
    kv_cache_memory_bytes: Bytes | None = Field(
        None, description="bytes of the cache; null: on a CPU 1 GiB or one sequence, on a GPU gpu_memory_utilization"
    )
    gpu_memory_utilization: Fraction | None = Field(None, description="part of a GPU's memory for weights and cache")
    max_model_len: Tokens | None = Field(None, description="maximum tokens of a sequence; null: the model's positions")
    max_num_batched_tokens: Tokens | None = Field(None, description="maximum tokens of a forward")
    block_size: Count | None = Field(None, description="tokens per block of the cache; null: 32 on a CPU")
    enable_prefix_caching: bool = Field(True, description="compute a common beginning of prompts once, and keep it")
    enforce_eager: bool | None = Field(None, description="compile nothing and use no CUDA graphs; null: on a CPU")
    kv_cache_dtype: str | None = Field(None, description="dtype of the cache; another one changes log-probabilities")
    arguments: Annotated[
        dict[str, Any], NeedsTrust("passes arguments to vLLM, some of which load code or open connections")
    ] = Field({}, description="further arguments of vLLM's `EngineArgs`, by name")

    @model_validator(mode="before")
    @classmethod
    def _not_owned(cls, values: Any) -> Any:
        further = values.get("arguments") if isinstance(values, Mapping) else None
        for given in (values, further):
            if owned := sorted(OWNED.keys() & set(given if isinstance(given, Mapping) else ())):
                raise ValueError(f"{owned[0]} cannot be set here: {OWNED[owned[0]]}")
        return values

    def given(self) -> dict[str, Any]:
        """Return the arguments that have a value."""
        own = {name: value for name, value in self.model_dump(exclude={"arguments"}).items() if value is not None}
        return {**own, **self.arguments}


class VllmGenerationConfig(GenerationConfig):
    """Settings of the generation engine `vllm`."""

    vllm: VllmKeys = VllmKeys()

"""The section `generation` for vLLM: `generation.vllm` has keys of vLLM's `EngineArgs`. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlframework.config.base import Section
from rlframework.config.numbers import Count, Fraction, Tokens, Workers
from rlframework.config.sections import GenerationConfig

Bytes = Annotated[int, Field(gt=0, le=10**14)]

OWNED: Mapping[str, str] = {
    "async_scheduling": "the engine works only inside `poll`",
    "data_parallel_size": "generation.workers.num_workers decides",
    "disable_log_stats": "vLLM's own statistics are off",
    "distributed_executor_backend": "it follows from tensor_parallel_size",
    "dtype": "policy.precision and generation.refit.dtype decide",
    "enable_lora": "adapters arrive merged (policy.lora.refit=merged)",
    "enable_sleep_mode": "it is on for GPUs, as `release` needs it",
    "generation_config": "requests say how to sample",
    "load_format": "weights arrive by refits",
    "logits_processors": "log-probabilities are those of the model",
    "logprobs_mode": "log-probabilities are those that the loss needs",
    "max_logprobs": "each sampled token has one log-probability",
    "max_num_seqs": "generation.batch_size decides",
    "model": "policy.model_name decides",
    "override_generation_config": "requests say how to sample",
    "pipeline_parallel_size": "pipelines are not supported",
    "quantization": "quantised weights are not supported",
    "seed": "each request has its own seed",
    "skip_tokenizer_init": "requests are tokens, so the engine loads no tokenizer",
    "speculative_config": "speculative decoding is not supported",
    "tokenizer": "requests are tokens, so the engine loads no tokenizer",
    "trust_remote_code": "the engine runs no code from a model's folder",
    "worker_cls": "it loads code",
    "worker_extension_cls": "it loads code",
}
"""Keys of vLLM that this plugin decides, and how."""


class VllmKeys(Section):
    """Keys of vLLM, under its own names; null: vLLM's default."""

    tensor_parallel_size: Workers = Field(1, description="GPUs of an engine, between which each layer is sharded")
    kv_cache_memory_bytes: Bytes | None = Field(
        None, description="bytes of the cache; null: on a CPU 1 GiB or one sequence, on a GPU gpu_memory_utilization"
    )
    gpu_memory_utilization: Fraction | None = Field(
        None, description="fraction of a GPU's memory for weights and cache"
    )
    max_model_len: Tokens | None = Field(None, description="maximum tokens of a sequence; null: the model's positions")
    max_num_batched_tokens: Tokens | None = Field(None, description="maximum tokens of a forward")
    block_size: Count | None = Field(None, description="tokens per block of the cache; null: 32 on a CPU")
    enable_prefix_caching: bool = Field(True, description="compute a common beginning of prompts once, and keep it")
    enable_chunked_prefill: bool | None = Field(None, description="split long prompts over several forwards")
    enforce_eager: bool | None = Field(None, description="compile nothing and use no CUDA graphs; null: on a CPU")
    kv_cache_dtype: str | None = Field(None, description="dtype of the cache; another one changes log-probabilities")
    cpu_offload_gb: Annotated[float, Field(ge=0.0, le=1e6)] | None = Field(
        None, description="GiB of weights on the CPU"
    )
    attention_backend: str | None = Field(None, description="one of vLLM's attention backends")
    enable_expert_parallel: bool | None = Field(None, description="distribute experts over the GPUs of an engine")
    disable_custom_all_reduce: bool | None = Field(None, description="reduce between GPUs with NCCL only")
    disable_cascade_attn: bool | None = Field(None, description="no cascade attention for common prefixes")
    optimization_level: Literal[0, 1, 2, 3] | None = Field(None, description="how much to compile")
    cudagraph_capture_sizes: tuple[Count, ...] | None = Field(None, description="batch sizes with a CUDA graph")

    @model_validator(mode="before")
    @classmethod
    def _not_owned(cls, values: Any) -> Any:
        for key in values if isinstance(values, Mapping) else ():
            if key in OWNED:
                raise ValueError(f"{key} cannot be set here: {OWNED[key]}")
        return values

    def given(self) -> dict[str, Any]:
        """Return the keys that have a value."""
        return {name: value for name, value in self.model_dump().items() if value is not None}


class VllmGenerationConfig(GenerationConfig):
    """Settings of the generation engine `vllm`."""

    vllm: VllmKeys = VllmKeys()

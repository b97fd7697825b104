"""The `policy.megatron` section and checks for configurations the backend does not support. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from shutil import which
from typing import Any, Literal

from pydantic import Field, field_validator

from rlframework.config.base import Section
from rlframework.config.device_defaults import Default
from rlframework.config.numbers import Workers
from rlframework.config.sections import RunConfig
from rlframework.plugins.model_checks import indivisible, lora_problems, model_config
from rlframework.plugins.types import Problem
from rlframework_megatron.architectures import ARCHITECTURES

INSTEAD = "Set policy.backend to dtensor."
GRADIENT_KERNELS = "fused_weight_gradient_mlp_cuda"
"""The extension of Apex that adds weight gradients to their fp32 buffers."""
C_COMPILERS = ("cc", "gcc", "clang")
"""The programs of which Triton needs one."""


class MegatronConfig(Section):
    """Options specific to the megatron backend."""

    distributed_optimizer: bool = Field(
        False, description="shard the optimizer state across the data-parallel workers; false: replicate it"
    )
    overlap_grad_reduce: bool = Field(False, description="reduce gradients across workers during the backward pass")
    overlap_param_gather: bool = Field(
        False,
        description="gather updated weights during the next forward pass; requires distributed_optimizer and "
        "overlap_grad_reduce",
    )
    fused_activation: bool = Field(
        False,
        description="on a GPU, compute the activation function of MLPs and its product in one kernel, made by "
        "torch.compile on first use; requires Triton and a C compiler",
    )
    fused_gradient_accumulation: bool = Field(
        False,
        description="on a GPU, matrix products add weight gradients to the fp32 buffers themselves; requires Apex's "
        f"extension {GRADIENT_KERNELS}",
    )
    virtual_pipeline: Workers = Field(
        1, description="model chunks per pipeline stage; above 1: the interleaved schedule"
    )
    transformer_engine: Literal["auto", "true", "false"] = Field(
        "auto",
        description="use Transformer Engine layers and grouped matrix multiplication for experts; auto: on a GPU if "
        "Transformer Engine is installed",
    )

    @field_validator("transformer_engine", mode="before")
    @classmethod
    def _as_word(cls, value: Any) -> Any:
        """Accept YAML booleans as the strings "true" and "false"."""
        return str(value).lower() if isinstance(value, bool) else value


def check(config: RunConfig, device: str) -> list[Problem]:
    """Return the problems that the record's capabilities do not express. `device`: "cpu" or "cuda"."""
    section = getattr(config.policy, "megatron", None) or MegatronConfig()
    model = model_config(config.policy.model_name)
    return [
        *_layout_problems(config, section, model),
        *_experts_problems(config, model),
        *_overlap_problems(section),
        *_fusion_problems(section, device),
        *_offload_problems(config, device),
        *_lora_problems(config, section),
        *_model_problems(model),
    ]


def device_defaults(config: RunConfig, device: str) -> list[Default]:
    """Return the defaults of `policy.megatron` on `device`: on a GPU what megatron-core has, and its packages allow."""
    if device != "cuda":
        return []
    section, parallelism = getattr(config.policy, "megatron", None) or MegatronConfig(), config.policy.parallelism
    found = []
    replicas = config.worker_group.num_workers // (parallelism.tensor * parallelism.pipeline)
    if replicas > 1:
        given = section.model_dump(exclude_unset=True)
        shards, overlaps = given.get("distributed_optimizer", True), given.get("overlap_grad_reduce", True)
        found += [
            ("distributed_optimizer", f"each of {replicas} replicas keeps 1/{replicas} of the 12 bytes a weight"),
            ("overlap_grad_reduce", "gradients are reduced while the last backward pass of a step runs"),
        ]
        if shards and overlaps:
            found.append(("overlap_param_gather", "updated weights are gathered while the next forward pass runs"))
    if compiles():
        found.append(("fused_activation", "Triton and a C compiler are there: fewer kernels, less is kept"))
    if find_spec(GRADIENT_KERNELS) is not None:
        found.append(("fused_gradient_accumulation", f"Apex's {GRADIENT_KERNELS} is there: no separate additions"))
    return [Default(f"policy.megatron.{key}", True, reason) for key, reason in found]


def _layout_problems(config: RunConfig, section: MegatronConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    parallelism, virtual = config.policy.parallelism, section.virtual_pipeline
    if (found := indivisible(model, parallelism.tensor)) is not None:
        yield Problem("policy.parallelism.tensor", f"{found}.", "Choose a divisor.")
    if parallelism.sequence and parallelism.tensor == 1:
        message = "sequence parallelism requires tensor parallelism, but policy.parallelism.tensor is 1."
        yield Problem("policy.parallelism.sequence", message, "Set it to false, or increase policy.parallelism.tensor.")
    if virtual > 1 and parallelism.pipeline == 1:
        message = f"{virtual} model chunks per stage need a pipeline, but policy.parallelism.pipeline is 1."
        remedy = "Set it to 1, or policy.parallelism.pipeline to 2 or more."
        yield Problem("policy.megatron.virtual_pipeline", message, remedy)
    layers, virtual_stages = model.get("num_hidden_layers"), parallelism.pipeline * virtual
    if isinstance(layers, int) and layers % virtual_stages:
        key = "policy.parallelism.pipeline" if virtual == 1 else "policy.megatron.virtual_pipeline"
        message = (
            f"the model has {layers} layers, not divisible by {parallelism.pipeline} stages of {virtual} model chunks."
        )
        yield Problem(key, message, f"Choose numbers whose product divides {layers}.")


def _experts_problems(config: RunConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    parallelism, coefficient = config.policy.parallelism, config.policy.router_aux_loss_coef
    key, experts = "policy.parallelism.expert", model.get("num_experts") or model.get("num_local_experts")
    described = ARCHITECTURES.get(str(model.get("model_type")))
    sparse = described is not None and described.mixture is not None
    data = config.worker_group.num_workers // parallelism.model_size
    if data % parallelism.expert:
        message = (
            f"{parallelism.expert} does not divide the {data} data-parallel workers that the experts are spread over."
        )
        yield Problem(key, message, "Choose a divisor, or 1.")
    if model and not sparse and (parallelism.expert > 1 or coefficient > 0):
        found = f"a {model.get('model_type')!r} model has no experts that this backend supports."
        yield Problem(key if parallelism.expert > 1 else "policy.router_aux_loss_coef", found, "Remove it.")
    if sparse and isinstance(experts, int) and experts % parallelism.expert:
        message = f"the model has {experts} experts, not divisible by {parallelism.expert}."
        yield Problem(key, message, "Choose a divisor.")
    if sparse:
        yield from _mixture_problems(config)


def _mixture_problems(config: RunConfig) -> Iterator[Problem]:
    parallelism = config.policy.parallelism
    if parallelism.tensor > 1 and not parallelism.sequence:
        message = "megatron-core trains mixtures of experts with tensor parallelism only under sequence parallelism."
        yield Problem("policy.parallelism.sequence", message, "Set it to true.")
    if parallelism.model_size > 1 and config.policy.router_aux_loss_coef > 0:
        message = "the load-balancing loss requires whole layers and sequences on each worker."
        remedy = "Set it to 0, or tensor, context and pipeline to 1."
        yield Problem("policy.router_aux_loss_coef", message, remedy)


def _overlap_problems(section: MegatronConfig) -> Iterator[Problem]:
    if section.overlap_param_gather and not (section.distributed_optimizer and section.overlap_grad_reduce):
        message = "it requires policy.megatron.distributed_optimizer and policy.megatron.overlap_grad_reduce."
        yield Problem("policy.megatron.overlap_param_gather", message, "Set both to true, or this to false.")


def _fusion_problems(section: MegatronConfig, device: str) -> Iterator[Problem]:
    if device != "cuda":  # fusions are not used
        return
    if section.fused_activation and not compiles():
        message = f"it needs the package triton and a C compiler ({', '.join(C_COMPILERS)}), which were not found."
        hint = "Install them, or set it to false."
        yield Problem("policy.megatron.fused_activation", message, hint, installation=True)
    if section.fused_gradient_accumulation and find_spec(GRADIENT_KERNELS) is None:
        message = f"it needs Apex's extension {GRADIENT_KERNELS}, which is not installed."
        hint = "Install Apex, or set it to false."
        yield Problem("policy.megatron.fused_gradient_accumulation", message, hint, installation=True)


def compiles() -> bool:
    """Whether `torch.compile` finds what it needs on a GPU: Triton, and a C compiler."""
    return find_spec("triton") is not None and any(which(name) for name in C_COMPILERS)


def _offload_problems(config: RunConfig, device: str) -> Iterator[Problem]:
    if config.policy.offload.parameters and device == "cuda":
        message = "megatron-core computes with weights on the GPU and cannot load them block by block."
        remedy = "Set it to false; policy.offload.optimizer keeps the optimizer state in CPU memory between steps."
        yield Problem("policy.offload.parameters", message, remedy)


def _lora_problems(config: RunConfig, section: MegatronConfig) -> Iterator[Problem]:
    yield from lora_problems(config)
    if config.policy.lora is None:
        return
    if config.policy.lora.part != "all":
        message = "the backend trains models of text only, which have no parts."
        yield Problem("policy.lora.part", message, "Set it to all.")
    if config.policy.parallelism.expert > 1:
        message = "LoRA with expert parallelism is not supported: it has not been validated."
        yield Problem("policy.parallelism.expert", message, "Set it to 1.")
    if section.transformer_engine == "true":
        message = "Transformer Engine's layers contain the norm before them, and cannot have LoRA adapters."
        yield Problem("policy.megatron.transformer_engine", message, "Set it to auto or false.")


def _model_problems(model: Mapping[str, Any]) -> Iterator[Problem]:
    for message in unsupported(model):
        yield Problem("policy.model_name", message, INSTEAD)


def unsupported(model: Mapping[str, Any]) -> Iterator[str]:
    """Describe unsupported features in a model's configuration; workers reject them too."""
    kind = model.get("model_type")
    if kind is None:  # the configuration is not available locally
        return
    if kind not in ARCHITECTURES:
        yield f"the megatron backend cannot convert {kind!r} models; it supports {', '.join(ARCHITECTURES)}."
        return
    for key in ARCHITECTURES[kind].fixed:
        if model.get(key):
            yield f"the model has {key}, which the backend does not support."
    if model.get("quantization_config"):
        yield "the model's weights are quantised; the backend reads only unquantised weights."

"""The section `policy.megatron`, and what of a configuration this backend cannot do. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from rlframework.config.base import Section
from rlframework.config.sections import RunConfig
from rlframework.plugins.model_checks import indivisible, model_config
from rlframework.plugins.types import Problem
from rlframework_megatron.names import KINDS

INSTEAD = "Set policy.backend to dtensor."
STATIC_ROTARY = ("default", "linear", "llama3", "proportional")
"""Kinds of rotary embeddings whose frequencies are the same for every length, and whose scores are not scaled."""


class MegatronConfig(Section):
    """What only the megatron backend has."""

    distributed_optimizer: bool = Field(
        False, description="share the optimizer's state among the workers that share the rows; false: each has all"
    )
    overlap_grad_reduce: bool = Field(False, description="add gradients up over workers while the backward goes on")
    overlap_param_gather: bool = Field(
        False, description="gather updated weights as the next forward needs them; takes distributed_optimizer"
    )
    virtual_pipeline: PositiveInt = Field(
        1, description="parts of the model on each stage of the pipeline (interleaved schedule); 1: one"
    )
    transformer_engine: Literal["auto", "true", "false"] = Field(
        "auto",
        description="layers of Transformer Engine, and experts in one grouped matrix product; auto: on a GPU "
        "where it is installed",
    )

    @field_validator("transformer_engine", mode="before")
    @classmethod
    def _as_word(cls, value: Any) -> Any:
        """YAML's true and false are words here."""
        return str(value).lower() if isinstance(value, bool) else value


def check(config: RunConfig, device: str) -> list[Problem]:
    """What the capabilities of the record do not say: `device` is "cpu" or "cuda"."""
    section = getattr(config.policy, "megatron", None) or MegatronConfig()
    model = model_config(config.policy.model_name)
    return [
        *_layout_problems(config, section, model),
        *_experts_problems(config, model),
        *_overlap_problems(section),
        *_offload_problems(config, device),
        *_model_problems(model),
    ]


def _layout_problems(config: RunConfig, section: MegatronConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    parallelism, virtual = config.policy.parallelism, section.virtual_pipeline
    if (found := indivisible(model, parallelism.tensor)) is not None:
        yield Problem("policy.parallelism.tensor", f"{found}.", "Choose a divisor.")
    if parallelism.sequence and parallelism.tensor == 1:
        message = "sequence parallelism goes with tensor parallelism, and policy.parallelism.tensor is 1."
        yield Problem("policy.parallelism.sequence", message, "Set it to false, or split tensors.")
    if virtual > 1 and parallelism.pipeline == 1:
        message = f"{virtual} parts on each stage need a pipeline, and policy.parallelism.pipeline is 1."
        yield Problem("policy.megatron.virtual_pipeline", message, "Set it to 1, or the pipeline to 2 or more.")
    layers, pieces = model.get("num_hidden_layers"), parallelism.pipeline * virtual
    if isinstance(layers, int) and layers % pieces:
        key = "policy.parallelism.pipeline" if virtual == 1 else "policy.megatron.virtual_pipeline"
        message = (
            f"the model has {layers} layers, which {parallelism.pipeline} stages of {virtual} parts do not divide."
        )
        yield Problem(key, message, "Choose numbers whose product divides them.")


def _experts_problems(config: RunConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    parallelism, coefficient = config.policy.parallelism, config.policy.router_aux_loss_coef
    key, experts = "policy.parallelism.expert", model.get("num_experts")
    sparse = model.get("model_type") == "qwen3_moe"
    data = config.worker_group.num_workers // parallelism.model_size
    if data % parallelism.expert:
        message = f"{parallelism.expert} does not divide the {data} workers that share the rows, who share the experts."
        yield Problem(key, message, "Choose a divisor, or 1.")
    if model and not sparse and (parallelism.expert > 1 or coefficient > 0):
        found = f"a model of the type {model.get('model_type')!r} has no experts that this backend knows."
        yield Problem(key if parallelism.expert > 1 else "policy.router_aux_loss_coef", found, "Leave it out.")
    if sparse and isinstance(experts, int) and experts % parallelism.expert:
        message = f"the model has {experts} experts, which {parallelism.expert} does not divide."
        yield Problem(key, message, "Choose a divisor.")
    if sparse:
        yield from _mixture_problems(config)


def _mixture_problems(config: RunConfig) -> Iterator[Problem]:
    parallelism = config.policy.parallelism
    if parallelism.tensor > 1 and parallelism.expert > 1:
        message = "a mixture's experts are either spread over workers, or their matrices split over tensor parallelism."
        yield Problem("policy.parallelism.tensor", message, "Set it, or policy.parallelism.expert, to 1.")
    elif parallelism.tensor > 1 and not parallelism.sequence:
        message = "megatron-core trains mixtures of experts with tensor parallelism where sequences are split too."
        yield Problem("policy.parallelism.sequence", message, "Set it to true.")
    if parallelism.model_size > 1 and config.policy.router_aux_loss_coef > 0:
        message = "the routers' loss is worked out where each worker has whole layers and sequences."
        remedy = "Set it to 0, or tensor, context and pipeline to 1."
        yield Problem("policy.router_aux_loss_coef", message, remedy)


def _overlap_problems(section: MegatronConfig) -> Iterator[Problem]:
    if section.overlap_param_gather and not (section.distributed_optimizer and section.overlap_grad_reduce):
        message = "weights are gathered beside the forward by the distributed optimizer, with overlap_grad_reduce."
        yield Problem("policy.megatron.overlap_param_gather", message, "Set both to true, or this to false.")


def _offload_problems(config: RunConfig, device: str) -> Iterator[Problem]:
    if config.policy.offload.parameters and device == "cuda":
        message = "megatron-core computes with weights that lie on the GPU, and takes none there block by block."
        remedy = "Set it to false; policy.offload.optimizer puts the optimizer's state into CPU memory between steps."
        yield Problem("policy.offload.parameters", message, remedy)


def _model_problems(model: Mapping[str, Any]) -> Iterator[Problem]:
    for message in _cannot(model):
        yield Problem("policy.model_name", message, INSTEAD)


def _cannot(model: Mapping[str, Any]) -> Iterator[str]:
    """What of a model, as its configuration says, is not there; the workers refuse it too."""
    kind = model.get("model_type")
    if kind is None:  # it is not at hand
        return
    if kind not in KINDS:
        yield f"the megatron backend has no conversion of {kind!r} models; it has those of {', '.join(KINDS)}."
        return
    for key in ("attention_bias", "mlp_bias"):
        if model.get(key):
            yield f"the model has {key}, and the backend has biases of queries, keys and values of Qwen2 only."
    if (activation := model.get("hidden_act", "silu")) != "silu":
        yield f"the model has the activation {activation!r}, and the backend has silu."
    windows = model.get("use_sliding_window") and model.get("sliding_window") and "layer_types" not in model
    if windows or "sliding_attention" in (model.get("layer_types") or ()):
        yield "the model has sliding windows, and the backend has none."
    if model.get("quantization_config"):
        yield "the model's weights are quantised, and the backend reads those that are not."
    yield from _rotary(model)


def _rotary(model: Mapping[str, Any]) -> Iterator[str]:
    """By the keys of transformers 5, and of 4."""
    rotary = {**(model.get("rope_scaling") or {}), **(model.get("rope_parameters") or {})}
    kind = rotary.get("rope_type") or rotary.get("type") or "default"
    if kind not in STATIC_ROTARY:
        yield f"the model has rotary embeddings of the kind {kind!r}, and the backend has {', '.join(STATIC_ROTARY)}."
    part = rotary.get("partial_rotary_factor", model.get("partial_rotary_factor", 1.0))
    if part != 1.0:
        yield f"the model has partial_rotary_factor {part}, and the backend turns whole heads."

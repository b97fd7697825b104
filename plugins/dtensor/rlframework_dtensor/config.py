"""The section `policy.dtensor`, and checks of configurations that the backend does not support. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from shutil import which
from typing import Annotated, Any, Literal

from pydantic import Field

from rlframework.config.base import NeedsTrust, Section
from rlframework.config.numbers import Workers
from rlframework.config.sections import RunConfig
from rlframework.plugins.model_checks import attention_problems, indivisible, lora_problems, model_config
from rlframework.plugins.types import Problem

EXPERT_KINDS = ("qwen2_moe", "qwen3_moe")
"""The model types whose experts several workers can share."""


class DTensorConfig(Section):
    """Settings of the dtensor backend."""

    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto",
        description="attention implementation of transformers; auto: sdpa, and segment attention for packed rows",
    )
    reshard_after_forward: bool = Field(
        True, description="free gathered weights after each forward; false: keep them until the backward"
    )
    reduce_gradients: Literal["auto", "step", "microbatch"] = Field(
        "auto",
        description="when gradients are summed over workers; step: once, which keeps whole gradients (fp32) of the "
        "worker's part of the model until then; auto: step on a GPU whose memory is 8 times that, else microbatch",
    )
    compile: bool = Field(
        False, description="compile each block with torch.compile: the first steps take a minute, later ones are faster"
    )
    replicate: Workers = Field(
        1, description="replicas of the weights among the data-parallel workers (HSDP); 1: shard over all of them"
    )
    custom_parallel_plan: Annotated[str | None, NeedsTrust("calls this function")] = Field(
        None, description="module:name of a tensor-parallel plan for the blocks; null: the built-in plan of the model"
    )


MEMORY_SHARE = 8
"""`reduce_gradients: auto` reduces once per step if this many times the whole gradients fit the memory of the GPU."""

COMPILERS = ("c++", "g++", "clang++")
"""The compilers that torch.compile looks for on a CPU, unless CXX names one."""


def check(config: RunConfig, device: str) -> list[Problem]:
    """Report problems that the record's capabilities do not cover. `device` is "cpu" or "cuda"."""
    section = getattr(config.policy, "dtensor", None) or DTensorConfig()
    return [
        *attention_problems(config, "policy.dtensor.attention", section.attention, device),
        *_layout_problems(config, section),
        *_compile_problems(config, section, device),
        *_lora_problems(config, section),
    ]


def _layout_problems(config: RunConfig, section: DTensorConfig) -> Iterator[Problem]:
    parallelism = config.policy.parallelism
    data = config.worker_group.num_workers // parallelism.model_size
    if data % section.replicate:
        message = f"{section.replicate} replicas of the weights do not divide the {data} data-parallel workers."
        yield Problem("policy.dtensor.replicate", message, "Set it to 1, or to a divisor.")
    yield from _experts_problems(config)
    if parallelism.tensor > 1:
        problem = indivisible(model_config(config.policy.model_name), parallelism.tensor)
        if problem:
            yield Problem("policy.parallelism.tensor", f"{problem}.", "Choose a divisor.")
        return
    if parallelism.sequence:
        message = "sequence parallelism requires tensor parallelism, but policy.parallelism.tensor is 1."
        yield Problem("policy.parallelism.sequence", message, "Set it to false, or raise policy.parallelism.tensor.")
    if section.custom_parallel_plan is not None:
        message = "a tensor-parallel plan has no effect while policy.parallelism.tensor is 1."
        yield Problem("policy.dtensor.custom_parallel_plan", message, "Remove it, or raise policy.parallelism.tensor.")


def _experts_problems(config: RunConfig) -> Iterator[Problem]:
    policy, model = config.policy, model_config(config.policy.model_name)
    expert, key = policy.parallelism.expert, "policy.parallelism.expert"
    if expert > 1:
        section = getattr(policy, "dtensor", None) or DTensorConfig()
        data = config.worker_group.num_workers // policy.parallelism.model_size
        others = {
            "policy.parallelism.context": policy.parallelism.context,
            "policy.parallelism.tensor": policy.parallelism.tensor,
            "policy.dtensor.replicate": section.replicate,
        }
        for other, size in others.items():
            if size > 1:
                yield Problem(
                    key, f"expert parallelism cannot be combined with {other}={size}.", "Set one of them to 1."
                )
        if data % expert:
            message = (
                f"{expert} does not divide {data}, the number of data-parallel workers that experts are sharded over."
            )
            yield Problem(key, message, "Choose a divisor, or 1.")
        if policy.lora is not None:
            yield Problem(
                key, "LoRA with expert parallelism is not supported: it has not been validated.", "Set it to 1."
            )
        if model and (problem := experts_problem(model, expert)):
            yield Problem(key, f"{problem}.", "Set it to 1, or choose a divisor.")
    if policy.router_aux_loss_coef > 0:
        key = "policy.router_aux_loss_coef"
        if model and (problem := experts_problem(model, 1)):
            yield Problem(key, f"{problem}.", "Set it to 0.")
        if policy.parallelism.context > 1 or policy.parallelism.tensor > 1:
            message = "the load-balancing loss is not supported with tensor or context parallelism."
            yield Problem(key, message, "Set it to 0, or these axes to 1.")


def experts_problem(model: Mapping[str, Any], expert: int) -> str | None:
    """Describe why `expert` workers cannot share the experts of `model` (a model configuration); None if they can."""
    kind = model.get("model_type")
    experts = model.get("num_experts") or model.get("num_local_experts")
    if kind not in EXPERT_KINDS:
        return f"this backend knows no experts of the model type {kind!r} (it knows {', '.join(EXPERT_KINDS)})"
    if isinstance(experts, int) and experts % expert:
        return f"the model has {experts} experts, not divisible by policy.parallelism.expert={expert}"
    return None


def _compile_problems(config: RunConfig, section: DTensorConfig, device: str) -> Iterator[Problem]:
    if not section.compile:
        return
    key = "policy.dtensor.compile"
    if device == "cpu" and not any(map(which, (os.environ.get("CXX", ""), *COMPILERS))):
        message = f"torch.compile needs a C++ compiler on a CPU, and none of {', '.join(COMPILERS)} was found."
        yield Problem(key, message, "Install one, or set it to false.")
    if (
        config.policy.parallelism.tensor > 1
    ):  # torch 2.13's compiler does not terminate on sharded weights with dynamic lengths
        message = "compiled blocks cannot be combined with tensor parallelism, and policy.parallelism.tensor is"
        yield Problem(key, f"{message} {config.policy.parallelism.tensor}.", "Set it to false.")
    policy = config.policy
    if policy.activation_checkpointing:  # with the framework's attention torch 2.13 runs such blocks eagerly, silently
        message = "compiled blocks cannot be combined with activation checkpointing: torch does not compile a "
        message += "checkpointed block whose attention is excluded from compilation."
        yield Problem(key, message, "Set it to false, or policy.activation_checkpointing to false.")
    if policy.parallelism.expert > 1 or policy.router_aux_loss_coef > 0:
        message = "compiled blocks with expert parallelism or a load-balancing loss are not supported: not validated."
        yield Problem(key, message, "Set it to false.")


def _lora_problems(config: RunConfig, section: DTensorConfig) -> Iterator[Problem]:
    yield from lora_problems(config)
    if config.policy.lora is not None and section.compile:  # not validated yet
        yield Problem("policy.dtensor.compile", "blocks with LoRA adapters cannot be compiled yet.", "Set it to false.")

"""The section `policy.dtensor`, and what of a configuration this backend cannot do. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from shutil import which
from typing import Any, Literal

from pydantic import Field, PositiveInt

from rlframework.config.base import Section
from rlframework.config.sections import RunConfig
from rlframework.models.file_names import KINDS
from rlframework.plugins.model_checks import attention_problems, indivisible, lora_problems, model_config
from rlframework.plugins.types import Problem


class DTensorConfig(Section):
    """What only the dtensor backend has."""

    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="attention of transformers; auto: sdpa, and attention by segments for packed rows"
    )
    reshard_after_forward: bool = Field(
        True, description="free the gathered weights after each forward; false: keep them until the backward"
    )
    compile: bool = Field(
        False, description="torch.compile of each block: faster steps after first ones that take a minute"
    )
    replicate: PositiveInt = Field(
        1, description="copies of the weights among the workers that share the rows (HSDP); 1: one, split over all"
    )
    custom_parallel_plan: str | None = Field(
        None, description="module:name of a plan of tensor parallelism for the blocks; none: the one for the model"
    )


COMPILERS = ("c++", "g++", "clang++")
"""What torch.compile looks for on a CPU, unless CXX names one."""


def check(config: RunConfig, device: str) -> list[Problem]:
    """What the capabilities of the record do not say: `device` is "cpu" or "cuda"."""
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
        message = f"{section.replicate} copies of the weights do not divide the {data} workers that share the rows."
        yield Problem("policy.dtensor.replicate", message, "Set it to 1, or to a divisor.")
    yield from _experts_problems(config)
    if parallelism.tensor > 1:
        found = indivisible(model_config(config.policy.model_name), parallelism.tensor)
        if found:
            yield Problem("policy.parallelism.tensor", f"{found}.", "Choose a divisor.")
        return
    if parallelism.sequence:
        message = "sequence parallelism goes with tensor parallelism, and policy.parallelism.tensor is 1."
        yield Problem("policy.parallelism.sequence", message, "Set it to false, or split tensors.")
    if section.custom_parallel_plan is not None:
        message = "a plan of tensor parallelism is of no use where policy.parallelism.tensor is 1."
        yield Problem("policy.dtensor.custom_parallel_plan", message, "Take it out, or split tensors.")


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
                    key, f"experts are not spread where {other} is {size}.", f"Set one of them to 1, not {expert}."
                )
        if data % expert:
            message = (
                f"{expert} does not divide {data}, the workers that share the rows, over which experts are spread."
            )
            yield Problem(key, message, "Choose a divisor, or 1.")
        if policy.lora is not None:
            yield Problem(key, "adapters beside experts that are spread have not been proven.", "Set it to 1.")
        if model and (found := experts_problem(model, expert)):
            yield Problem(key, f"{found}.", "Set it to 1, or choose a divisor.")
    if policy.router_aux_loss_coef > 0:
        key = "policy.router_aux_loss_coef"
        if model and (found := experts_problem(model, 1)):
            yield Problem(key, f"{found}.", "Set it to 0.")
        if policy.parallelism.context > 1 or policy.parallelism.tensor > 1:
            message = "the loss of the routers is not there beside tensor and context parallelism."
            yield Problem(key, message, "Set it to 0, or these axes to 1.")


def experts_problem(model: Mapping[str, Any], expert: int) -> str | None:
    """Why a model, as its configuration says, has no experts that `expert` workers can share; None where it has."""
    kind = model.get("model_type")
    experts = model.get("num_experts") or model.get("num_local_experts")
    if kind not in KINDS:
        return f"a model of the type {kind!r} has no experts that this backend knows (it knows {', '.join(KINDS)})"
    if isinstance(experts, int) and experts % expert:
        return f"the model has {experts} experts, which policy.parallelism.expert={expert} does not divide"
    return None


def _compile_problems(config: RunConfig, section: DTensorConfig, device: str) -> Iterator[Problem]:
    if not section.compile:
        return
    key = "policy.dtensor.compile"
    if device == "cpu" and not any(map(which, (os.environ.get("CXX", ""), *COMPILERS))):
        message = f"torch.compile needs a C++ compiler on a CPU: none of {', '.join(COMPILERS)} is there."
        yield Problem(key, message, "Install one, or set it to false.")
    if config.policy.parallelism.tensor > 1:  # torch 2.13's compiler does not end on split weights and any lengths
        message = "compiled blocks do not go with tensor parallelism, and policy.parallelism.tensor is"
        yield Problem(key, f"{message} {config.policy.parallelism.tensor}.", "Set it to false.")
    if config.policy.parallelism.expert > 1 or config.policy.router_aux_loss_coef > 0:
        message = "compiled blocks beside experts that are spread, or a loss of the routers, have not been proven."
        yield Problem(key, message, "Set it to false.")


def _lora_problems(config: RunConfig, section: DTensorConfig) -> Iterator[Problem]:
    yield from lora_problems(config)
    if config.policy.lora is not None and section.compile:  # not proven yet
        yield Problem("policy.dtensor.compile", "blocks with adapters are not compiled so far.", "Set it to false.")

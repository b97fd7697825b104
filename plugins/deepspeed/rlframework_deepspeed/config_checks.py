"""Checks for configurations this backend does not support, before any process starts. Imports no torch or deepspeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import which
from typing import Any

from rlframework.config.policy import ParallelismConfig
from rlframework.config.sections import RunConfig
from rlframework.plugins.model_checks import attention_problems, indivisible, lora_problems, model_config
from rlframework.plugins.types import Problem
from rlframework_deepspeed.config import ACCUMULATING_STAGES, DeepSpeedConfig, Keys, OffloadKeys
from rlframework_deepspeed.neutral_keys import disagreements

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""DeepSpeed's names of dtypes, and the values of policy.precision."""
COMPILERS = ("g++", "ninja")
"""The programs DeepSpeed compiles extensions with."""


def check(config: RunConfig, device: str) -> list[Problem]:
    """Return the problems that the record's capabilities do not express. `device`: "cpu" or "cuda"."""
    section = getattr(config.policy, "deepspeed", None) or DeepSpeedConfig()
    return [
        *_not_taken_problems(section),
        *disagreements(config, section),
        *attention_problems(config, "policy.deepspeed.attention", section.attention, device),
        *_precision_problems(config, section, device),
        *_layout_problems(config, section),
        *_offload_problems(config, section, device),
        *lora_problems(config),
        *_part_problems(config),
    ]


def _not_taken_problems(section: DeepSpeedConfig) -> Iterator[Problem]:
    zero = section.zero_optimization
    parts: tuple[Keys | None, ...] = (section, zero, zero.offload_param, zero.offload_optimizer, section.bf16)
    for keys in filter(None, (*parts, section.fp16, section.tensor_parallel)):
        for name, reason in keys.not_taken.items():
            key = ".".join(filter(None, ("policy.deepspeed", keys.place, name)))
            yield Problem(key, f"{reason}.", "Remove it.")


def _part_problems(config: RunConfig) -> Iterator[Problem]:
    """DeepSpeed needs a backward of each microbatch; with a frozen language model rows of text have none."""
    policy, message = config.policy, "a frozen language model is not supported by this backend."
    if policy.freeze == "language":
        yield Problem("policy.freeze", message, "Set it to vision or null, or policy.backend to dtensor.")
    if policy.lora is not None and policy.lora.part == "vision":
        yield Problem("policy.lora.part", message, "Set it to language or all, or policy.backend to dtensor.")


def _precision_problems(config: RunConfig, section: DeepSpeedConfig, device: str) -> Iterator[Problem]:
    accumulation, stage = (section.data_types or {}).get("grad_accum_dtype"), section.zero_optimization.stage
    differs = DTYPES.get(str(accumulation), accumulation) != config.policy.precision
    if accumulation is not None and differs and stage not in ACCUMULATING_STAGES:
        message = (
            f"gradients are added up in {config.policy.precision} with ZeRO stage {stage}, but it is {accumulation}."
        )
        remedy = "Remove it, or set policy.deepspeed.zero_optimization.stage to 2 or 3."
        yield Problem("policy.deepspeed.data_types.grad_accum_dtype", message, remedy)
    if config.policy.precision == "float16" and device != "cuda":
        message = f"float16 with loss scaling needs a GPU, but the device is {device}."
        yield Problem("policy.precision", message, "Set it to bfloat16 or float32.")


def _layout_problems(config: RunConfig, section: DeepSpeedConfig) -> Iterator[Problem]:
    parallelism, tensor = config.policy.parallelism, section.tensor_parallel
    yield from _exchange_problems(config, section)
    if parallelism.tensor > 1:
        found = indivisible(model_config(config.policy.model_name), parallelism.tensor)
        if found:
            yield Problem("policy.parallelism.tensor", f"{found}.", "Choose a divisor.")
        return
    for name in ("preset_model", "partition_config"):
        if getattr(tensor, name) is not None:
            message = "a tensor-parallel plan has no effect because policy.parallelism.tensor is 1."
            yield Problem(f"policy.deepspeed.tensor_parallel.{name}", message, "Remove it, or increase that size.")


def _exchange_problems(config: RunConfig, section: DeepSpeedConfig) -> Iterator[Problem]:
    parallelism = config.policy.parallelism
    if section.sequence_exchange == "gather" or parallelism.context == 1:
        return
    if found := unexchangeable(model_config(config.policy.model_name), parallelism):
        yield Problem("policy.deepspeed.sequence_exchange", f"{found}.", "Set it to gather.")


def unexchangeable(model: Mapping[str, Any], parallelism: ParallelismConfig) -> str | None:
    """Return why `ulysses` cannot exchange the heads of a model configuration; None if it can, or if unknown.

    Key-value heads fewer than the ranks are repeated equally often.
    """
    size, tensor = parallelism.context, parallelism.tensor
    heads = model.get("num_attention_heads")
    kv_heads = model.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        return None
    here = "" if tensor == 1 else f", 1/{tensor} of them after policy.parallelism.tensor"
    if heads % (size * tensor):
        return f"the model has {heads} attention heads{here}, which policy.parallelism.context={size} does not divide"
    own = kv_heads // tensor
    if own and own % size and size % own:
        return f"the model has {kv_heads} key-value heads{here}, which policy.parallelism.context={size} cannot share"
    return None


def _offload_problems(config: RunConfig, section: DeepSpeedConfig, device: str) -> Iterator[Problem]:
    """ZeRO offloads the optimizer state from stage 1 on and weights in stage 3. On a CPU it is a no-op."""
    zero, neutral = section.zero_optimization, config.policy.offload
    for name, key, wanted, least, offload in (
        ("offload_optimizer", "optimizer", neutral.optimizer, 1, zero.offload_optimizer),
        ("offload_param", "parameters", neutral.parameters, 3, zero.offload_param),
    ):
        own = f"policy.deepspeed.zero_optimization.{name}"
        asked = offload is not None and offload.device in ("cpu", "nvme")
        if offload is not None:
            yield from _disk_problems(own, offload, zero.stage, device)
        if device == "cpu" and not (offload is not None and offload.device == "nvme"):
            continue
        if (wanted or asked) and zero.stage < least:
            message = f"it needs ZeRO stage {least}, but policy.deepspeed.zero_optimization.stage is {zero.stage}."
            yield Problem(own if asked else f"policy.offload.{key}", message, f"Set the stage to {least}.")


def _disk_problems(key: str, offload: OffloadKeys, stage: int, device: str) -> Iterator[Problem]:
    if offload.device != "nvme":
        return
    if offload.nvme_path is None:
        yield Problem(f"{key}.nvme_path", "device is nvme, but no folder on the disk is given.", "Set it to one.")
    elif not Path(offload.nvme_path).expanduser().is_dir():
        yield Problem(f"{key}.nvme_path", f"{offload.nvme_path} is not a folder.", "Create it on every machine.")
    if stage != 3:
        yield Problem(f"{key}.device", f"nvme needs ZeRO stage 3, but the stage is {stage}.", "Set it to cpu.")
    if device != "cuda":
        yield Problem(f"{key}.device", f"nvme needs a GPU, but the device is {device}.", "Remove it.")
    elif missing := [name for name in COMPILERS if which(name) is None]:
        message = f"DeepSpeed compiles its disk access on first use, which requires {' and '.join(missing)}."
        yield Problem(f"{key}.device", message, "Install what is missing (apt-get install g++), or set it to cpu.")

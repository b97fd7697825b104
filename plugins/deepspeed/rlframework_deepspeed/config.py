"""The `policy.deepspeed` section, with DeepSpeed's own keys, and the configuration for `deepspeed.initialize`.

Keys that the framework decides are accepted, because existing files contain them; `neutral_keys` checks that they
agree with the neutral keys. `rejected_keys` lists DeepSpeed keys that this backend does not support; `check` reports
them with the reason. A key unknown to both is an immediate error. Does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, ValidationError, model_validator

from rlframework.config.base import NeedsTrust, Section
from rlframework.config.numbers import Coefficient, Fraction, Steps
from rlframework.config.policy import PolicyConfig
from rlframework_deepspeed.rejected_keys import REJECTED, switched_off

Size = Annotated[int, Field(ge=0, le=10**12)] | None
Switch = bool | None
Table = dict[str, Any] | None


class Keys(Section):
    """A section of DeepSpeed's configuration. Missing keys keep DeepSpeed's default; `auto` counts as missing."""

    place: ClassVar[str] = ""
    """The path of the section under `policy.deepspeed`."""
    _not_taken: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def not_taken(self) -> dict[str, str]:
        """Given keys that this backend does not support, with the reasons; reported by `check`."""
        return dict(self._not_taken)

    def given(self) -> dict[str, Any]:
        """The keys that were given, under DeepSpeed's names."""
        given = {name: getattr(self, name) for name in type(self).model_fields}
        return {
            name: value.given() if isinstance(value, Keys) else value
            for name, value in given.items()
            if value is not None
        }

    @classmethod
    def prepared(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the mapping to validate instead of `values`."""
        return values

    @model_validator(mode="wrap")
    @classmethod
    def _taken(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(values, Mapping):
            return handler(values)
        values, reasons = cls.prepared(values), REJECTED.get(cls.place, {})
        made = handler({key: value for key, value in values.items() if key not in reasons})
        made._not_taken = {key: reasons[key] for key in values if key in reasons and not switched_off(values[key])}
        return made


class OffloadKeys(Keys):
    """Where weights or the optimizer state are kept between uses."""

    device: Literal["none", "cpu", "nvme"] | None = Field(None, description="default: follows policy.offload")
    nvme_path: str | None = Field(None, description="folder on the disk, for device: nvme")
    pin_memory: Switch = Field(None, description="page-locked memory; DeepSpeed's default is true")
    buffer_count: Size = None


class OffloadParamKeys(OffloadKeys):
    """Offloading of weights."""

    place = "zero_optimization.offload_param"

    buffer_size: Size = None
    max_in_cpu: Size = None


class OffloadOptimizerKeys(OffloadKeys):
    """Offloading of the optimizer state; the optimizer step then runs on the CPU."""

    place = "zero_optimization.offload_optimizer"

    pipeline_read: Switch = None
    pipeline_write: Switch = None
    fast_init: Switch = None
    ratio: Fraction | None = None


class ZeroKeys(Keys):
    """ZeRO: the state that data-parallel workers shard."""

    place = "zero_optimization"

    stage: Literal[0, 1, 2, 3] = Field(
        2, description="state to shard; 0: nothing; 1: optimizer state; 2: also gradients; 3: also weights"
    )
    offload_param: OffloadParamKeys | None = Field(None, description="like policy.offload.parameters; stage 3 only")
    offload_optimizer: OffloadOptimizerKeys | None = Field(
        None, description="like policy.offload.optimizer; stage 1 and up"
    )
    contiguous_gradients: Switch = None
    reduce_scatter: Switch = None
    reduce_bucket_size: Size = None
    use_multi_rank_bucket_allreduce: Switch = None
    allgather_partitions: Switch = None
    allgather_bucket_size: Size = None
    overlap_comm: Switch = None
    sub_group_size: Size = None
    round_robin_gradients: Switch = None
    parameter_alignment: Switch = None
    ignore_unused_parameters: Switch = None
    load_from_fp32_weights: Switch = None
    memory_efficient_linear: Switch = None
    log_trace_cache_warnings: Switch = None
    enable_sanity_checks: Switch = None
    leaf_module: Table = None
    stage3_prefetch_bucket_size: Size = None
    stage3_param_persistence_threshold: Size = None
    stage3_model_persistence_threshold: Size = None
    stage3_max_live_parameters: Size = None
    stage3_max_reuse_distance: Size = None
    stage3_module_granularity_threshold: Size = None
    stage3_use_all_reduce_for_fetch_params: Switch = None
    stage3_allgather_sequential: Switch = None
    stage3_gather_16bit_weights_on_model_save: Switch = None


class Bf16Keys(Keys):
    """bfloat16, enabled by policy.precision."""

    place = "bf16"

    enabled: Switch = None


class Fp16Keys(Keys):
    """float16, enabled by policy.precision; DeepSpeed's keys control loss scaling."""

    place = "fp16"

    enabled: Switch = None
    loss_scale: Annotated[float, Field(ge=0.0, le=1e12)] | None = Field(None, description="0: dynamic")
    initial_scale_power: Size = None
    loss_scale_window: Steps | None = None
    hysteresis: Size = None
    consecutive_hysteresis: Switch = None
    min_loss_scale: Steps | None = None


class TensorParallelKeys(Keys):
    """AutoTP; policy.parallelism.tensor sets the number of workers."""

    place = "tensor_parallel"

    autotp_size: Size = None
    preset_model: str | None = Field(None, description="one of DeepSpeed's plans, by model type")
    partition_config: Table = Field(None, description="a custom plan in DeepSpeed's format")
    tp_overlap_comm: Switch = None


class DeepSpeedConfig(Keys):
    """Options specific to the deepspeed backend: DeepSpeed's own keys."""

    config: str | None = Field(
        None, description="DeepSpeed JSON file, read when the configuration is loaded; keys of this section override it"
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto",
        description="attention implementation of transformers; auto: sdpa, and segment attention for packed rows",
    )
    sequence_exchange: Literal["gather", "ulysses"] = Field(
        "gather",
        description="how policy.parallelism.context ranks exchange a sequence; gather: keys and values; ulysses: heads",
    )
    zero_optimization: ZeroKeys = ZeroKeys()
    bf16: Bf16Keys = Bf16Keys()
    fp16: Fp16Keys = Fp16Keys()
    tensor_parallel: TensorParallelKeys = TensorParallelKeys()
    sequence_parallel_size: Size = Field(None, description="policy.parallelism.context decides")
    train_batch_size: Size = Field(None, description="policy.train_global_batch_size decides")
    train_micro_batch_size_per_gpu: Size = Field(None, description="policy.train_micro_batch_size decides")
    gradient_accumulation_steps: Size = Field(None, description="follows from the batch sizes under policy")
    gradient_clipping: Coefficient | None = Field(None, description="policy.max_grad_norm decides; 0: none")
    optimizer: Table = Field(None, description="policy.optimizer decides")
    scheduler: Table = Field(None, description="policy.scheduler decides")
    activation_checkpointing: Table = Field(None, description="policy.activation_checkpointing decides")
    zero_force_ds_cpu_optimizer: Literal[False] | None = Field(None, description="the optimizer is torch's")
    zero_allow_untested_optimizer: Literal[True] | None = Field(None, description="the optimizer is torch's")
    communication_data_type: Literal["fp16", "bf16", "fp32"] | None = Field(
        None, description="dtype of the gradient reduction; default: follows the precision"
    )
    aio: Table = Field(None, description="disk I/O settings for offloading to nvme")
    data_types: Table = Field(
        None, description="grad_accum_dtype: dtype in which gradients of microbatches are added; default: the precision"
    )
    comms_logger: Table = None
    flops_profiler: Annotated[Table, NeedsTrust("overwrites the file that it names as output_file")] = None
    timers: Table = None
    wall_clock_breakdown: Switch = None
    memory_breakdown: Switch = None
    dump_state: Switch = None
    steps_per_print: Steps | None = None
    log_level: str | None = None

    @classmethod
    def prepared(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Merge the file's keys with those of the section, which take precedence; drop "auto"."""
        own = {key: value for key, value in values.items() if key != "config"}
        path = values.get("config")
        if path is None:
            return without_auto(own)
        if not isinstance(path, str):
            raise ValueError(f"config: must be the name of a JSON file, given {path!r}")
        return without_auto(_merged(_read(path), own))


ACCUMULATING_STAGES = (2, 3)
"""ZeRO stages that can add up gradients in fp32 beside half-precision weights."""

BUCKET = 500_000_000
"""Default size of ZeRO's gradient buckets in elements: DeepSpeed's own, capped at the model size."""

UNKNOWN = "neither DeepSpeed nor this backend has such a key"

OWN = ("config", "attention", "sequence_exchange")
"""Keys of the section that are not DeepSpeed's."""

OWNED = (
    *OWN,
    "sequence_parallel_size",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "activation_checkpointing",
    "zero_optimization",
    "bf16",
    "fp16",
    "tensor_parallel",
)
"""Keys that `engine_config` sets or omits; all others are passed to DeepSpeed unchanged."""


def engine_config(policy: PolicyConfig, section: DeepSpeedConfig, *, device: str) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`: the section's keys and the framework's decisions.

    Uses microbatches of one row and no accumulation, because the framework accumulates, schedules, clips and supplies
    the optimizer. Offloading to CPU memory is omitted on a CPU. `device`: "cpu" or "cuda".
    """
    passed = {key: value for key, value in section.given().items() if key not in OWNED}
    config: dict[str, Any] = {
        **passed,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero_keys(policy, section, device),
        "bf16": {"enabled": policy.precision == "bfloat16"},
        "fp16": {"enabled": False},
    }
    if policy.precision == "float16":
        config["fp16"] = {**section.fp16.given(), "enabled": True}
    if policy.parallelism.tensor > 1:
        config["tensor_parallel"] = {**section.tensor_parallel.given(), "autotp_size": policy.parallelism.tensor}
    return config


def zero_keys(policy: PolicyConfig, section: DeepSpeedConfig, device: str) -> dict[str, Any]:
    """`zero_optimization` with the neutral offload keys merged in, and without keys the device or stage lacks."""
    zero = section.zero_optimization
    keys = zero.given()
    wanted = {
        "offload_param": policy.offload.parameters,
        "offload_optimizer": policy.offload.optimizer or policy.offload.parameters,
    }
    for name, neutral in wanted.items():
        offload = {"device": "cpu" if neutral else "none", **keys.pop(name, {})}
        if device != "cpu" and offload["device"] != "none":
            keys[name] = offload
    return {"stage": 0} if zero.stage == 0 else keys


def _read(path: str) -> dict[str, Any]:
    """Read and validate the keys of a JSON file; raise a `ValueError` that names the file."""
    try:
        values = json.loads(Path(path).expanduser().read_text(encoding="utf-8"), object_pairs_hook=_no_doubles)
    except OSError as error:
        raise ValueError(f"config: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # a JSONDecodeError is one
        raise ValueError(f"config: {path} is not a JSON file of DeepSpeed's: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"config: {path} must contain an object with DeepSpeed's keys, not a {type(values).__name__}")
    own = sorted(set(OWN) & values.keys())
    if own:
        raise ValueError(f"config: {path}: {own[0]} is not a DeepSpeed key; set it in policy.deepspeed")
    try:
        DeepSpeedConfig.model_validate(values)
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, item['loc']))}: {_said(item)}" for item in error.errors())
        raise ValueError(f"config: {path}: {found}") from None
    return _merged({"zero_optimization": {"stage": 0}}, values)  # DeepSpeed's default


def _said(item: Mapping[str, Any]) -> str:
    return UNKNOWN if item["type"] == "extra_forbidden" else str(item["msg"])


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    double = next((key for key in keys if keys.count(key) > 1), None)
    if double is not None:
        raise ValueError(f"duplicate key {double!r}")
    return dict(pairs)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `above` over `below` recursively; None in `above` keeps the value in `below`."""
    merged = dict(below)
    for key, value in above.items():
        inside = merged.get(key)
        if isinstance(inside, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(inside, value)
        elif value is not None:
            merged[key] = value
    return merged


def without_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop keys whose value is "auto", except `attention`, where it is meaningful."""
    return {
        key: without_auto(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key == "attention" or value != "auto"
    }

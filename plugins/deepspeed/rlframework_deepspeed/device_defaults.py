"""The defaults of `policy.deepspeed` on a GPU. Imports no torch or deepspeed."""

from __future__ import annotations

from collections.abc import Iterator

from rlframework.config.device_defaults import Default
from rlframework.config.sections import RunConfig
from rlframework_deepspeed.config import ACCUMULATING_STAGES, DeepSpeedConfig, ZeroKeys

GPU_BUCKET = 100_000_000
"""Elements of a bucket of gradients on a GPU: 0.2 GB in half precision, of which DeepSpeed reserves one or two."""


def device_defaults(config: RunConfig, device: str) -> list[Default]:
    """Return the defaults of keys that neither the section nor its file has; `device`: "cpu" or "cuda"."""
    if device != "cuda":
        return []
    section = getattr(config.policy, "deepspeed", None) or DeepSpeedConfig()
    ranks = config.worker_group.num_workers // config.policy.parallelism.tensor
    found = [*_precision_defaults(config, section, ranks), *_bucket_defaults(config, section.zero_optimization, ranks)]
    return [Default(f"policy.deepspeed.{key}", value, reason) for key, value, reason in found]


def _precision_defaults(config: RunConfig, section: DeepSpeedConfig, ranks: int) -> Iterator[tuple[str, object, str]]:
    if section.communication_data_type is None and ranks > 1:
        yield "communication_data_type", "fp32", "sums over workers are not rounded to half precision at each addition"
    unscaled = config.policy.precision != "float16"  # with loss scaling it has not been verified
    accumulates = section.zero_optimization.stage in ACCUMULATING_STAGES
    if unscaled and accumulates and (section.data_types or {}).get("grad_accum_dtype") is None:
        yield (
            "data_types.grad_accum_dtype",
            "fp32",
            "sums over microbatches are not rounded to half precision each time",
        )


def _bucket_defaults(config: RunConfig, zero: ZeroKeys, ranks: int) -> Iterator[tuple[str, object, str]]:
    if zero.stage == 0:
        return
    if zero.reduce_bucket_size is None:
        reason = "several buckets in a backward pass, so that reducing overlaps it, and less memory for them"
        yield "zero_optimization.reduce_bucket_size", GPU_BUCKET, reason
    offloads = zero.offload_optimizer is not None or config.policy.offload.optimizer or config.policy.offload.parameters
    if zero.overlap_comm is None and zero.stage < 3 and ranks > 1 and not offloads:  # stage 3 overlaps by itself
        yield "zero_optimization.overlap_comm", True, "gradients are reduced while the backward pass goes on"

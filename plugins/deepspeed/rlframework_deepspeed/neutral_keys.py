"""DeepSpeed keys with a neutral equivalent: a value that differs from the neutral key is a problem.

The neutral key always decides; these keys are accepted because existing files contain them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import RunConfig
from rlframework.plugins.types import Problem
from rlframework_deepspeed.config import DeepSpeedConfig

NEUTRAL: Mapping[str, str] = {
    "train_batch_size": "policy.train_global_batch_size",
    "train_micro_batch_size_per_gpu": "policy.train_micro_batch_size",
    "gradient_accumulation_steps": "policy.train_global_batch_size",
    "gradient_clipping": "policy.max_grad_norm",
    "optimizer": "policy.optimizer",
    "scheduler": "policy.scheduler",
    "bf16.enabled": "policy.precision",
    "fp16.enabled": "policy.precision",
    "tensor_parallel.autotp_size": "policy.parallelism.tensor",
    "sequence_parallel_size": "policy.parallelism.context",
    "activation_checkpointing": "policy.activation_checkpointing",
    "zero_optimization.offload_optimizer": "policy.offload.optimizer",
    "zero_optimization.offload_param": "policy.offload.parameters",
}
"""DeepSpeed's keys and the neutral keys that decide."""

OPTIMIZERS = ("adamw", "adam")
"""DeepSpeed optimizer types that are AdamW; "Adam" is too, unless adam_w_mode is false."""

SCHEDULES: Mapping[str, str] = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""DeepSpeed's schedulers and their names in policy.scheduler.name."""

PRECISIONS: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16"}


def disagreements(config: RunConfig, section: DeepSpeedConfig) -> Iterator[Problem]:
    """Yield a problem for each key of the section that differs from its neutral key."""
    policy, parallelism = config.policy, config.policy.parallelism
    pairs = {
        "train_batch_size": (section.train_batch_size, policy.train_global_batch_size),
        "train_micro_batch_size_per_gpu": (section.train_micro_batch_size_per_gpu, policy.train_micro_batch_size),
        "tensor_parallel.autotp_size": (section.tensor_parallel.autotp_size or None, parallelism.tensor),
        "sequence_parallel_size": (section.sequence_parallel_size or None, parallelism.context),
        "gradient_clipping": (section.gradient_clipping, policy.max_grad_norm or 0.0),
    }
    for key, (given, value) in pairs.items():
        if given is not None and given != value:
            yield _disagree(key, given, NEUTRAL[key], value)
    yield from _accumulation(config, section)
    yield from _precision(policy, section)
    yield from _optimizer(policy, section.optimizer or {})
    yield from _scheduler(policy, section.scheduler or {})
    yield from _checkpointing(section.activation_checkpointing or {})
    yield from _offload(policy, section)


def _disagree(key: str, given: object, neutral: str, value: object) -> Problem:
    message = f"it says {given}, and {neutral}, which decides, is {value}."
    return Problem(f"policy.deepspeed.{key}", message, f"Remove it, or set {neutral} to the same value.")


def _accumulation(config: RunConfig, section: DeepSpeedConfig) -> Iterator[Problem]:
    policy, given = config.policy, section.gradient_accumulation_steps
    if given is None:
        return
    data = max(1, config.worker_group.num_workers // policy.parallelism.model_size)
    follows = -(-policy.train_global_batch_size // (policy.train_micro_batch_size * data))
    if given != follows:
        message = (
            f"it says {given}, and {follows} microbatches follow from policy.train_global_batch_size="
            f"{policy.train_global_batch_size} and policy.train_micro_batch_size={policy.train_micro_batch_size} "
            f"on {data} data-parallel workers."
        )
        yield Problem("policy.deepspeed.gradient_accumulation_steps", message, "Remove it, or change those.")


def _precision(policy: PolicyConfig, section: DeepSpeedConfig) -> Iterator[Problem]:
    for name, precision in PRECISIONS.items():
        enabled = section.bf16.enabled if name == "bf16" else section.fp16.enabled
        if enabled is not None and enabled != (policy.precision == precision):
            key = f"{name}.enabled"
            yield _disagree(key, str(enabled).lower(), NEUTRAL[key], policy.precision)


def _optimizer(policy: PolicyConfig, optimizer: Mapping[str, Any]) -> Iterator[Problem]:
    kind, params = str(optimizer.get("type", "AdamW")), _params(optimizer)
    if kind.lower() not in OPTIMIZERS or params.get("adam_w_mode") is False:
        shown = kind if kind.lower() not in OPTIMIZERS else f"{kind} without decoupled weight decay"
        yield _disagree("optimizer.type", shown, "policy.optimizer.name", policy.optimizer.name)
        return
    own = {
        "lr": policy.optimizer.lr,
        "betas": policy.optimizer.betas,
        "eps": policy.optimizer.eps,
        "weight_decay": policy.optimizer.weight_decay,
    }
    for name, given in params.items():
        if name in own and not _same(given, own[name]):
            yield _disagree(f"optimizer.params.{name}", given, f"policy.optimizer.{name}", own[name])
        elif name not in own and name not in ("adam_w_mode", "torch_adam", "fused"):
            yield _unsupported(f"optimizer.params.{name}", NEUTRAL["optimizer"])


def _scheduler(policy: PolicyConfig, scheduler: Mapping[str, Any]) -> Iterator[Problem]:
    """Compare the schedulers; the framework's warm-up is linear, so an explicit logarithmic one is a problem."""
    own, key = policy.scheduler, "scheduler"
    kind = scheduler.get("type")
    if kind is not None and SCHEDULES.get(kind) != own.name:
        yield _disagree(f"{key}.type", kind, "policy.scheduler.name", own.name)
    known: dict[str, tuple[str, object]] = {
        "warmup_num_steps": ("policy.scheduler.warmup_steps", own.warmup_steps),
        "total_num_steps": ("policy.scheduler.total_steps", own.total_steps),
        "warmup_max_lr": ("policy.optimizer.lr", policy.optimizer.lr),
        "cos_min_ratio": ("policy.scheduler.min_ratio", own.min_ratio),
        "warmup_min_lr": ("what a warm-up starts at", 0),
        "warmup_min_ratio": ("what a warm-up starts at", 0),
        "warmup_type": ("the form of a warm-up", "linear"),
    }
    for name, given in _params(scheduler).items():
        if name not in known:
            yield _unsupported(f"{key}.params.{name}", NEUTRAL[key])
        elif not _same(given, known[name][1]):
            neutral, value = known[name]
            if neutral.startswith("policy."):
                yield _disagree(f"{key}.params.{name}", given, neutral, value)
            else:
                message = f"it says {given}, and {neutral} is always {value} under policy.scheduler, which decides."
                yield Problem(f"policy.deepspeed.{key}.params.{name}", message, "Remove it.")


def _checkpointing(given: Mapping[str, Any]) -> Iterator[Problem]:
    for name, value in given.items():
        if value:
            yield _unsupported(f"activation_checkpointing.{name}", NEUTRAL["activation_checkpointing"])


def _offload(policy: PolicyConfig, section: DeepSpeedConfig) -> Iterator[Problem]:
    """Report sections with device "none" whose neutral key enables offloading."""
    zero = section.zero_optimization
    neutral = {
        "offload_optimizer": (zero.offload_optimizer, policy.offload.optimizer),
        "offload_param": (zero.offload_param, policy.offload.parameters),
    }
    for name, (given, wanted) in neutral.items():
        key = f"zero_optimization.{name}"
        if given is not None and given.device == "none" and wanted:
            yield _disagree(f"{key}.device", "none", NEUTRAL[key], "true")


def _params(section: Mapping[str, Any]) -> dict[str, Any]:
    params = section.get("params")
    return dict(params) if isinstance(params, Mapping) else {}


def _unsupported(key: str, neutral: str) -> Problem:
    message = f"{neutral} decides, and has no such option."
    return Problem(f"policy.deepspeed.{key}", message, "Remove it.")


def _same(given: object, value: object) -> bool:
    """Whether the values are equal, treating lists and tuples alike."""
    if isinstance(given, Sequence) and isinstance(value, Sequence) and not isinstance(given, str):
        return tuple(given) == tuple(value)
    return given == value

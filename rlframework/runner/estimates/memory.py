"""Estimate the memory of one worker by purpose and by phase of a step.

Weights, gradients and moments are counted, and assumed to be sharded over all workers (FSDP, ZeRO-3, or a split model
with a sharded optimizer). Activations are those of a Llama layer. Allocator overhead and libraries are a fixed amount.
docs/observers.md compares estimates with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlframework.config.sections import RunConfig
    from rlframework.runner.estimates.model import ModelSize
    from rlframework.runner.estimates.rows import Rows

Place = Literal["device", "host"]
Phase = Literal["always", "generating", "scoring", "training"]

PROGRAM = 400 << 20
"""Bytes of a CPU process with PyTorch and transformers, without a model."""

GPU_PROGRAM, CUDA_CONTEXT = 2 << 30, 600 << 20
"""Bytes of a process with CUDA's libraries, and of the CUDA context on the GPU."""

LOGITS_CHUNK = 32 << 20
"""The most bytes of logits that the head holds at once: `rlframework.policy.head.logprobs.CHUNK_ELEMENTS` in fp32."""

LOGITS_COPIES = 3
"""Training: logits, tensor saved for the backward, gradient. Sampling: logits, probabilities, cumulative sums."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one worker for one purpose, with their place and the phase of a step that needs them."""

    name: str
    bytes: int
    place: Place
    phase: Phase = "always"


def worker_memory(config: RunConfig, model: ModelSize, rows: Rows, device: str, reference: bool) -> list[MemoryUse]:
    """The memory of one worker of `config` on `device` ("cpu" or "cuda"), by purpose."""
    on: Place = "host" if device == "cpu" else "device"
    program = [MemoryUse("program", PROGRAM, "host")]
    if device != "cpu":
        program = [MemoryUse("program", GPU_PROGRAM, "host"), MemoryUse("CUDA context", CUDA_CONTEXT, "device")]
    return [*program, *_states(config, model, on, reference), *_training(config, model, rows, on, device),
            *_generating(config, model, rows, on)]  # fmt: skip


def peak(parts: list[MemoryUse], place: Place) -> int:
    """The peak in bytes at `place`: everything permanent plus the largest phase."""
    local = [part for part in parts if part.place == place]
    sums = {phase: sum(part.bytes for part in local if part.phase == phase) for phase in {part.phase for part in local}}
    always = sums.pop("always", 0)
    return always + max(sums.values(), default=0)


def microbatch_tokens(config: RunConfig, rows: Rows, device: str) -> int:
    """Tokens of the largest microbatch; assumes the reference backend's size if it is left to the backend."""
    policy, workers = config.policy, config.worker_group.num_workers // config.policy.parallelism.model_size
    rows_per_worker = -(-policy.train_global_batch_size // workers)
    if policy.batching.mode == "padded":
        return min(policy.train_micro_batch_size, rows_per_worker) * rows.longest
    most = max(policy.batching.tokens or (1024 if device == "cpu" else 8192), rows.longest)
    return min(most, round(rows_per_worker * max(rows.mean, 1.0)) + rows.longest)


def _width(config: RunConfig) -> int:
    return 4 if config.policy.precision == "float32" else 2


def _states(config: RunConfig, model: ModelSize, on: Place, reference: bool) -> list[MemoryUse]:
    workers, offload = config.worker_group.num_workers, config.policy.offload
    weights, trained = 4 * model.parameters // workers, 4 * model.trained // workers
    parts = [
        MemoryUse("weights", weights, "host" if offload.parameters else on),
        MemoryUse("gradients", trained, on, "training"),
        MemoryUse("optimizer", 2 * trained, "host" if offload.optimizer else on),
    ]
    if workers > 1 or _width(config) < 4:
        parts.append(MemoryUse("gathered weights", 2 * _width(config) * model.largest_block, on, "training"))
    if reference and config.policy.lora is None:
        parts.append(MemoryUse("reference", weights, "host"))
        parts.append(MemoryUse("copy of the weights", weights, "host", "scoring"))
    return parts


def _training(config: RunConfig, model: ModelSize, rows: Rows, on: Place, device: str) -> list[MemoryUse]:
    width, policy = _width(config), config.policy
    tokens = microbatch_tokens(config, rows, device)
    tokens //= policy.parallelism.tensor * policy.parallelism.context
    layers = -(-model.layers // policy.parallelism.pipeline)
    per_layer = model.activation_bytes(width)
    per_token = layers * model.hidden * width + per_layer if policy.activation_checkpointing else layers * per_layer
    logits = 4 * tokens * model.vocabulary
    # temporary gradient of the embedding, and of the head if its logits are computed in chunks
    ends = 4 * model.vocabulary * model.hidden * (2 if logits > LOGITS_CHUNK else 1)
    frozen = policy.lora is not None  # adapters train neither embedding nor head
    return [
        MemoryUse("activations", tokens * per_token, on, "training"),
        MemoryUse("logits", LOGITS_COPIES * min(logits, LOGITS_CHUNK), on, "training"),
        *([] if frozen else [MemoryUse("gradients of embedding and head", ends, on, "training")]),
    ]


def _generating(config: RunConfig, model: ModelSize, rows: Rows, on: Place) -> list[MemoryUse]:
    """The key-value cache of one decoding batch, sampling, and the engine's own copy of the model."""
    if not rows.generated:
        return []
    width, workers = _width(config), config.worker_group.num_workers
    rows_per_batch = min(
        config.generation.batch_size, -(-rows.count // (workers // config.policy.parallelism.model_size))
    )
    per_layer = 2 * rows_per_batch * rows.longest * model.key_value * width
    parts = [
        MemoryUse(
            "keys and values", (model.layers + 2) * per_layer, on, "generating"
        ),  # the cache grows layer by layer
        MemoryUse("sampling", LOGITS_COPIES * 4 * rows_per_batch * model.vocabulary, on, "generating"),
    ]
    if workers > 1 or width < 4:
        parts.append(MemoryUse("generation model", width * model.parameters, on))
    return parts

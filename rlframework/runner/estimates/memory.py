"""What one worker holds in memory, part by part and phase by phase.

A reckoning, not a measurement: weights, gradients and moments are counted; activations are those of a Llama's layer;
what allocators keep and libraries load is a flat sum. Weights, gradients and moments are taken to be shared by all
workers (FSDP, ZeRO-3, or a split model with its optimizer sharded). docs/observers.md says how far it was off.
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
"""A process with PyTorch and transformers on a CPU, before it has a model."""

PROGRAM_OF_GPU, CONTEXT = 2 << 30, 600 << 20
"""The same with CUDA's libraries, and what CUDA takes of the GPU."""

LOGITS_CHUNK = 32 << 20
"""The most logits that the head holds at once: `rlframework.policy.head.head.CHUNK_ELEMENTS` in fp32."""

COPIES_OF_LOGITS = 3
"""Logits, what is kept of them for the backward, and their gradient; in sampling: logits, probabilities, their sums."""


@dataclass(frozen=True)
class Part:
    """Bytes of one worker for one purpose: where they lie, and in which phase of a step."""

    name: str
    bytes: int
    place: Place
    phase: Phase = "always"


def worker_memory(config: RunConfig, model: ModelSize, rows: Rows, device: str, reference: bool) -> list[Part]:
    """The parts of the memory of one worker of `config` on `device` ("cpu" or "cuda")."""
    on: Place = "host" if device == "cpu" else "device"
    program = [Part("program", PROGRAM, "host")]
    if device != "cpu":
        program = [Part("program", PROGRAM_OF_GPU, "host"), Part("CUDA context", CONTEXT, "device")]
    return [*program, *_states(config, model, on, reference), *_training(config, model, rows, on, device),
            *_generating(config, model, rows, on)]  # fmt: skip


def peak(parts: list[Part], place: Place) -> int:
    """The most bytes of `place` at once: what is always there, and the largest phase."""
    here = [part for part in parts if part.place == place]
    sums = {phase: sum(part.bytes for part in here if part.phase == phase) for phase in {part.phase for part in here}}
    always = sums.pop("always", 0)
    return always + max(sums.values(), default=0)


def microbatch_tokens(config: RunConfig, rows: Rows, device: str) -> int:
    """Tokens of the largest microbatch. Where the configuration leaves it to the backend, what the reference takes."""
    policy, workers = config.policy, config.worker_group.num_workers // config.policy.parallelism.model_size
    of_a_worker = -(-policy.train_global_batch_size // workers)
    if policy.batching.mode == "padded":
        return min(policy.train_micro_batch_size, of_a_worker) * rows.longest
    most = max(policy.batching.tokens or (1024 if device == "cpu" else 8192), rows.longest)
    return min(most, round(of_a_worker * max(rows.mean, 1.0)) + rows.longest)


def _width(config: RunConfig) -> int:
    return 4 if config.policy.precision == "float32" else 2


def _states(config: RunConfig, model: ModelSize, on: Place, reference: bool) -> list[Part]:
    workers, offload = config.worker_group.num_workers, config.policy.offload
    weights, trained = 4 * model.parameters // workers, 4 * model.trained // workers
    parts = [
        Part("weights", weights, "host" if offload.parameters else on),
        Part("gradients", trained, on, "training"),
        Part("optimizer", 2 * trained, "host" if offload.optimizer else on),
    ]
    if workers > 1 or _width(config) < 4:
        parts.append(Part("gathered weights", 2 * _width(config) * model.largest_block, on, "training"))
    if reference and config.policy.lora is None:
        parts.append(Part("reference", weights, "host"))
        parts.append(Part("weights put aside", weights, "host", "scoring"))
    return parts


def _training(config: RunConfig, model: ModelSize, rows: Rows, on: Place, device: str) -> list[Part]:
    width, policy = _width(config), config.policy
    tokens = microbatch_tokens(config, rows, device)
    tokens //= policy.parallelism.tensor * policy.parallelism.context
    layers = -(-model.layers // policy.parallelism.pipeline)
    of_layer = model.activation_bytes(width)
    of_token = layers * model.hidden * width + of_layer if policy.activation_checkpointing else layers * of_layer
    logits = 4 * tokens * model.vocabulary
    # the gradient of the embedding before it is added to the sum; of the head too, where it is summed over chunks
    ends = 4 * model.vocabulary * model.hidden * (2 if logits > LOGITS_CHUNK else 1)
    frozen = policy.lora is not None  # adapters leave both ends alone
    return [
        Part("activations", tokens * of_token, on, "training"),
        Part("logits", COPIES_OF_LOGITS * min(logits, LOGITS_CHUNK), on, "training"),
        *([] if frozen else [Part("gradients at the ends", ends, on, "training")]),
    ]


def _generating(config: RunConfig, model: ModelSize, rows: Rows, on: Place) -> list[Part]:
    """Keys and values of the rows that are decoded together, and what the engine holds besides."""
    if not rows.generated:
        return []
    width, workers = _width(config), config.worker_group.num_workers
    together = min(config.generation.batch_size, -(-rows.count // (workers // config.policy.parallelism.model_size)))
    of_layer = 2 * together * rows.longest * model.key_value * width
    parts = [
        Part("keys and values", (model.layers + 2) * of_layer, on, "generating"),  # the cache grows layer by layer
        Part("sampling", COPIES_OF_LOGITS * 4 * together * model.vocabulary, on, "generating"),
    ]
    if workers > 1 or width < 4:
        parts.append(Part("model to generate with", width * model.parameters, on))
    return parts

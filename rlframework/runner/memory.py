"""Estimate the memory of one worker by purpose and by phase of a step, from the sizes of the model.

Sizes come from the model's configuration, on the meta device, without loading weights. Weights, gradients and moments
are counted, and assumed to be sharded over all workers (FSDP, ZeRO-3, or a split model with a sharded optimizer).
Activations are those of a Llama layer. Allocator overhead and libraries are a fixed amount. docs/observers.md compares
estimates with measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlframework.config.policy import LoraConfig, PolicyConfig
from rlframework.config.sections import RunConfig
from rlframework.huggingface.hub import quiet_hub
from rlframework.huggingface.model_directories import first_size, quiet_transformers

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
class Rows:
    """The number of rows of a step, and the mean and maximum of their tokens if every answer reaches its limit.

    `generated`: the most tokens that a step generates.
    """

    count: int
    mean: float
    longest: int
    generated: int = 0

    @property
    def trained(self) -> int:
        """Tokens of all rows of a step, including prompts."""
        return round(self.count * self.mean)


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model: parameters, those with a gradient (`trained`), layers, and widths per token."""

    parameters: int
    trained: int
    largest_block: int
    layers: int
    hidden: int
    intermediate: int
    key_value: int
    vocabulary: int

    def activation_bytes(self, width: int) -> int:
        """Bytes that one layer saves for the backward of one token, with `width` bytes per number.

        Counted for a Llama layer: both norms save their input and two fp32 intermediates; attention saves query,
        output, the copy of the output for the projection, keys and values; the MLP saves four intermediate widths.
        """
        norms = 4 * self.hidden * 4 + 2 * self.hidden * width
        return norms + (3 * self.hidden + 2 * self.key_value + 4 * self.intermediate) * width


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
    tokens = microbatch_tokens(config, rows, device)
    return [
        *program,
        *_states(config, model, on, reference),
        *_training(config, model, tokens, on),
        *(_generating(config, model, rows, on) if rows.generated else []),
    ]


def peak(parts: Sequence[MemoryUse], place: Place) -> int:
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


def _training(config: RunConfig, model: ModelSize, tokens: int, on: Place) -> list[MemoryUse]:
    width, policy = _width(config), config.policy
    tokens //= policy.parallelism.tensor * policy.parallelism.context
    layers = -(-model.layers // policy.parallelism.pipeline)
    per_layer = model.activation_bytes(width)
    per_token = layers * model.hidden * width + per_layer if policy.activation_checkpointing else layers * per_layer
    logits = 4 * tokens * model.vocabulary
    parts = [
        MemoryUse("activations", tokens * per_token, on, "training"),
        MemoryUse("logits", LOGITS_COPIES * min(logits, LOGITS_CHUNK), on, "training"),
    ]
    if policy.lora is None:  # adapters train neither embedding nor head
        # temporary gradient of the embedding, and of the head if its logits are computed in chunks
        ends = 4 * model.vocabulary * model.hidden * (2 if logits > LOGITS_CHUNK else 1)
        parts.append(MemoryUse("gradients of embedding and head", ends, on, "training"))
    return parts


def _generating(config: RunConfig, model: ModelSize, rows: Rows, on: Place) -> list[MemoryUse]:
    """The key-value cache of one decoding batch, sampling, and the engine's own copy of the model."""
    width, workers = _width(config), config.worker_group.num_workers
    each = -(-rows.count // (workers // config.policy.parallelism.model_size))
    batch = min(config.generation.batch_size, each)
    cache = 2 * batch * rows.longest * model.key_value * width  # of a layer; the whole grows layer by layer
    parts = [
        MemoryUse("keys and values", (model.layers + 2) * cache, on, "generating"),
        MemoryUse("sampling", LOGITS_COPIES * 4 * batch * model.vocabulary, on, "generating"),
    ]
    if workers > 1 or width < 4:
        parts.append(MemoryUse("generation model", width * model.parameters, on))
    return parts


def model_size(config: PolicyConfig) -> ModelSize:
    """The sizes of the model `policy.model_name`. Leaves the process's random states unchanged."""
    import torch

    from rlframework.models.loading import auto_class, load_config

    with quiet_hub():
        found = load_config(config)
    with torch.random.fork_rng(devices=[]), torch.device("meta"), quiet_transformers():
        model = auto_class(found).from_config(found, dtype=torch.float32, trust_remote_code=config.trust_remote_code)
    text = found.get_text_config()
    hidden = _first(text, "hidden_size", "n_embd")
    heads = _first(text, "num_attention_heads", "n_head")
    head = _first(text, "head_dim") or hidden // max(heads, 1)
    # the MLP width that one token passes through: of a mixture of experts, the total over its top-k experts
    experts, width = _first(text, "num_experts_per_tok"), _first(text, "moe_intermediate_size")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelSize(
        parameters=parameters,
        trained=parameters if config.lora is None else _adapters(model, config.lora),
        largest_block=_largest_block(model),
        layers=_first(text, "num_hidden_layers", "n_layer"),
        hidden=hidden,
        intermediate=experts * width or _first(text, "intermediate_size", "n_inner") or 4 * hidden,
        key_value=head * (_first(text, "num_key_value_heads") or heads),
        vocabulary=_first(text, "vocab_size"),
    )


def _first(config: Any, *names: str) -> int:
    return first_size(config, *names) or 0


def _largest_block(model: Any) -> int:
    """The most parameters that a sharding engine gathers at once: a layer's, or those of embedding and head."""
    from torch.nn import ModuleList

    lists = [module for module in model.modules() if isinstance(module, ModuleList)]
    blocks: list[int] = [sum(p.numel() for p in block.parameters()) for blocks in lists for block in blocks]
    inside = {id(p) for blocks in lists for p in blocks.parameters()}
    ends: int = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    return max([ends, *blocks])


def _adapters(model: Any, config: LoraConfig) -> int:
    from torch.nn import Linear

    return sum(
        config.rank * (module.in_features + module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, Linear) and any(f".{name}".endswith(f".{end}") for end in config.target_modules)
    )

"""Estimate a run's memory per worker, disk and tokens per step, and warn of what does not fit this machine.

Sizes come from the model's configuration, on the meta device, without loading weights. Weights, gradients and moments
are counted, and assumed to be sharded over all workers (FSDP, ZeRO-3, or a split model with a sharded optimizer).
Activations are those of a Llama layer. Allocator overhead and libraries are a fixed amount. docs/observers.md compares
estimates with measurements.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import RunConfig
from rlframework.configure import resolve_device
from rlframework.datasets.rendering import render_prompt, render_samples
from rlframework.datasets.tokens import TokenData
from rlframework.errors import DataError
from rlframework.huggingface.hub import quiet_hub
from rlframework.huggingface.model_directories import first_size, model_positions, quiet_transformers
from rlframework.interfaces.environment import Sample
from rlframework.observers.host import Gpu, available_memory, free_disk, gpus
from rlframework.training.input_checks import evenly_spaced, longest

if TYPE_CHECKING:
    from rich.table import Table

    from rlframework.algorithm import Parts

_LOG = logging.getLogger(__name__)

Place = Literal["device", "host"]
Phase = Literal["always", "generating", "scoring", "training"]

PLACES: dict[Place, str] = {"device": "GPU", "host": "RAM"}

PROGRAM, GPU_PROGRAM, CUDA_CONTEXT = 400 << 20, 2 << 30, 600 << 20
"""Bytes of a process with PyTorch and transformers on a CPU, with CUDA's libraries, and of the context on its GPU."""

LOGITS_CHUNK = {"cpu": 32 << 20, "cuda": 1 << 30}
"""The most bytes of logits that the head holds at once: `rlframework.policy.head.chunks.CHUNK_ELEMENTS` in fp32."""

LOGITS_COPIES = 3
"""Training: logits, tensor saved for the backward, gradient. Sampling: logits, probabilities, cumulative sums."""

CHECKPOINT_BYTES = 12
"""Bytes per parameter in a checkpoint: weight and two moments in fp32."""

MARGIN = 1.1
"""Factor on the memory estimate before it is compared with free memory: measured peaks exceed it by up to this."""

RENDERED, LONGEST = 256, 16
"""Of the samples, this many are rendered at even distances, and the longest by characters."""


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


@dataclass(frozen=True)
class Estimate:
    """The estimate of a run. Free memory and disk are in bytes, and None if unknown.

    `disk`: bytes by purpose; `output_dir_problem`: why the run cannot start in its `output_dir`.
    """

    config: RunConfig
    device: str
    parameters: int
    memory: list[MemoryUse]
    disk: dict[str, int]
    rows: Rows
    free_memory: int | None
    free_disk: int | None
    gpus: Sequence[Gpu] = ()
    output_dir_problem: str | None = None

    @property
    def host_bytes(self) -> int:
        """Peak memory in bytes of all workers on this machine."""
        return self.config.worker_group.num_workers * peak(self.memory, "host")

    def lines(self) -> list[str]:
        """The lines that a run prints at its start."""
        place: Place = "host" if self.device == "cpu" else "device"
        parts = ", ".join(f"{part.name} {gib(part.bytes)}" for part in self.memory if part.place == place)
        most = gib(peak(self.memory, place))
        workers = self.config.worker_group.num_workers
        several = f" ({workers} workers)" if workers > 1 else ""
        disk = ", ".join(f"{name} {gib(size)}" for name, size in self.disk.items())
        generated = f"generates up to {self.rows.generated:,} tokens and " if self.rows.generated else ""
        about = "up to" if self.rows.generated else "about"
        return [
            f"estimate: {self.parameters:,} parameters; a worker{several} needs about {most} GiB at its peak: {parts}",
            f"estimate: disk in GiB: {disk}; a step {generated}trains on {about} {self.rows.trained:,}",
        ]

    def warnings(self) -> list[str]:
        """One line per problem; empty if everything fits."""
        found: list[str] = []
        remedy = "Reduce the tokens of a microbatch (policy.batching.tokens) or the model"
        if self.free_memory is not None and MARGIN * self.host_bytes > self.free_memory:
            found.append(
                f"the run may need {gib(self.host_bytes)} GiB of memory, and {gib(self.free_memory)} GiB are free. "
                f"{remedy}, or generation.batch_size, or worker_group.num_workers"
            )
        needed, free = peak(self.memory, "device"), min((gpu.free_bytes for gpu in self.gpus), default=None)
        if free is not None and MARGIN * needed > free:
            found.append(
                f"a worker may need {gib(needed)} GiB of its GPU, and {gib(free)} GiB are free. {remedy}, "
                "set policy.activation_checkpointing=true, or use more workers"
            )
        written = sum(self.disk.values())
        if self.free_disk is not None and written > self.free_disk:
            found.append(
                f"the run may write {gib(written)} GiB, and {gib(self.free_disk)} GiB are free at output_dir="
                f"{str(self.config.output_dir)!r}. Free some space, write somewhere else, or keep fewer checkpoints "
                "(checkpoints.keep_last)"
            )
        return [f"warning: {text}" for text in (*found, self.output_dir_problem) if text is not None]

    def table(self) -> Table:
        """All figures as a table, for `--dry-run`."""
        from rich.table import Table

        table = Table("What", "When", title="Estimate", title_justify="left")
        table.add_column("GiB", justify="right")
        for place, where in PLACES.items():
            if most := peak(self.memory, place):
                for part in self.memory:
                    if part.place == place:
                        table.add_row(f"{where} of a worker: {part.name}", part.phase, gib(part.bytes))
                table.add_row(f"{where} of a worker, at its peak", "", gib(most))
        table.add_row(f"RAM of all {self.config.worker_group.num_workers} workers", "peak", gib(self.host_bytes))
        table.add_row("RAM, free", "now", gib(self.free_memory))
        for number, gpu in enumerate(self.gpus):
            table.add_row(f"GPU {number} ({gpu.name}), free", "now", gib(gpu.free_bytes))
        for name, size in self.disk.items():
            table.add_row(f"disk: {name}", "", gib(size))
        table.add_row("disk, free", "now", gib(self.free_disk))
        table.add_row("tokens generated per step, at most", f"{self.rows.generated:,}", "")
        table.add_row("tokens trained on per step", f"{self.rows.trained:,}", "")
        return table


def estimate(parts: Parts, reference: bool) -> Estimate:
    """Estimate the run of `parts`, which needs no workers. `reference`: the run keeps a reference policy."""
    config = parts.config
    device, model, rows = resolve_device(config.device), model_size(config.policy), rows_of(parts)
    return Estimate(
        config=config,
        device=device,
        parameters=model.parameters,
        memory=worker_memory(config, model, rows, device, reference),
        disk=disk(config, model.parameters, model.trained),
        rows=rows,
        free_memory=available_memory(),
        free_disk=free_disk(config.output_dir),
        gpus=gpus() if device == "cuda" else (),
    )


def print_estimate(parts: Parts, reference: bool) -> None:
    """Print the estimate on stdout (with `observers.console`), and log its warnings.

    A model whose sizes cannot be determined does not prevent training; a message says so. For invalid data it
    prints nothing, because the algorithm checks all data and reports the error.
    """
    try:
        found = estimate(parts, reference)
    except DataError:
        return
    except Exception as error:  # noqa: BLE001 - model configurations vary without limit
        _LOG.warning("no estimate of memory and disk: %s: %s", type(error).__name__, error)
        return
    if parts.config.observers.console:
        print(*found.lines(), sep="\n", flush=True)
    for warning in found.warnings():
        _LOG.warning("%s", warning)


def disk(config: RunConfig, parameters: int, trained: int) -> dict[str, int]:
    """The most bytes that the run has on disk at once, by purpose.

    Includes the checkpoint being written, besides those that are kept. `trained` is the number of parameters in a
    checkpoint.
    """
    steps, section, every = config.algorithm.num_steps, config.checkpoints, config.recording.every
    kept = min(section.keep_last + section.keep_best + 1, steps // section.every) if section.every else 0
    recorded = len({*config.recording.steps, *(range(every, steps + 1, every) if every else ())})
    found = {
        "trained model": 4 * parameters,
        f"{kept} checkpoints": kept * CHECKPOINT_BYTES * trained,
        f"{recorded} recorded steps": recorded * 4 * parameters,
    }
    return {name: size for name, size in found.items() if size}


def gib(size: int | None) -> str:
    """Format bytes in GiB with two or three significant digits; "?" if unknown."""
    if size is None:
        return "?"
    value = size / 2**30
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def rows_of(parts: Parts) -> Rows:
    """Estimate the rows of a step. An algorithm whose configuration has `prompts_per_step` generates its rows."""
    algorithm: Any = parts.config.algorithm
    policy, answer = parts.config.policy, parts.config.generation.max_new_tokens
    count, generated = policy.train_global_batch_size, 0
    if (prompts := getattr(algorithm, "prompts_per_step", None)) is not None:
        count = prompts * getattr(algorithm, "samples_per_prompt", 1)
        generated = count * answer
        lengths = [len(render_prompt(parts.tokenizer, sample.messages)) + answer for sample in _selected(parts)]
        limit = model_positions(policy.model_name, policy.trust_remote_code) or max(lengths)
        lengths = [min(length, limit) for length in lengths]
    elif getattr(algorithm, "token_data", None) is not None:
        lengths = TokenData(algorithm.token_data).lengths.tolist()
    else:
        how: Any = getattr(algorithm, "train_on", "all"), getattr(algorithm, "max_tokens", None)
        lengths = [len(ids) for ids, _ in render_samples(parts.tokenizer, _selected(parts), *how)]
    return Rows(count, sum(lengths) / len(lengths), max(lengths), generated)


def _selected(parts: Parts) -> list[Sample]:
    samples = parts.environment.samples("train")
    if not len(samples):
        raise DataError("the environment has no train samples")
    return evenly_spaced(samples, RENDERED) + (longest(samples, LONGEST) if len(samples) > RENDERED else [])


def worker_memory(config: RunConfig, model: ModelSize, rows: Rows, device: str, reference: bool) -> list[MemoryUse]:
    """The memory of one worker of `config` on `device` ("cpu" or "cuda"), by purpose."""
    policy, workers, parallelism = config.policy, config.worker_group.num_workers, config.policy.parallelism
    on: Place = "host" if device == "cpu" else "device"
    width = 4 if policy.precision == "float32" else 2
    full = policy.lora is None
    weights, trained = 4 * model.parameters // workers, 4 * model.trained // workers
    copies = workers > 1 or width < 4  # the engine computes with other tensors than the fp32 weights

    tokens = microbatch_tokens(config, rows, device) // (parallelism.tensor * parallelism.context)
    layers = -(-model.layers // parallelism.pipeline)
    layer = model.activation_bytes(width)
    token = layers * model.hidden * width + layer if policy.activation_checkpointing else layers * layer
    logits, chunk = 4 * tokens * model.vocabulary, LOGITS_CHUNK[device]
    # temporary gradient of the embedding, and of the head if its logits are computed in chunks
    ends = 4 * model.vocabulary * model.hidden * (2 if logits > chunk else 1)

    batch = min(config.generation.batch_size, -(-rows.count // (workers // parallelism.model_size)))
    batch = batch if rows.generated else 0
    cache = 2 * batch * rows.longest * model.key_value * width  # of a layer; the whole grows layer by layer
    uses = [
        MemoryUse("program", PROGRAM if device == "cpu" else GPU_PROGRAM, "host"),
        MemoryUse("CUDA context", 0 if device == "cpu" else CUDA_CONTEXT, "device"),
        MemoryUse("weights", weights, "host" if policy.offload.parameters else on),
        MemoryUse("gradients", trained, on, "training"),
        MemoryUse("optimizer", 2 * trained, "host" if policy.offload.optimizer else on),
        MemoryUse("gathered weights", copies * 2 * width * model.largest_block, on, "training"),
        MemoryUse("reference", reference * full * weights, "host"),
        MemoryUse("copy of the weights", reference * full * weights, "host", "scoring"),
        MemoryUse("activations", tokens * token, on, "training"),
        MemoryUse("logits", LOGITS_COPIES * min(logits, chunk), on, "training"),
        MemoryUse("gradients of embedding and head", full * ends, on, "training"),  # adapters train neither
        MemoryUse("keys and values", (model.layers + 2) * cache, on, "generating"),
        MemoryUse("sampling", LOGITS_COPIES * 4 * batch * model.vocabulary, on, "generating"),
        MemoryUse("generation model", bool(batch) * copies * width * model.parameters, on),
    ]
    return [use for use in uses if use.bytes]


def peak(parts: Sequence[MemoryUse], place: Place) -> int:
    """The peak in bytes at `place`: everything permanent plus the largest phase."""
    local = [part for part in parts if part.place == place]
    sums = {phase: sum(part.bytes for part in local if part.phase == phase) for phase in {part.phase for part in local}}
    return sums.pop("always", 0) + max(sums.values(), default=0)


def microbatch_tokens(config: RunConfig, rows: Rows, device: str) -> int:
    """Tokens of the largest microbatch; assumes the reference backend's size if it is left to the backend."""
    policy, workers = config.policy, config.worker_group.num_workers // config.policy.parallelism.model_size
    rows_per_worker = -(-policy.train_global_batch_size // workers)
    if policy.batching.mode == "padded":
        return min(policy.train_micro_batch_size, rows_per_worker) * rows.longest
    most = max(policy.batching.tokens or (1024 if device == "cpu" else 8192), rows.longest)
    return min(most, round(rows_per_worker * max(rows.mean, 1.0)) + rows.longest)


def model_size(config: PolicyConfig) -> ModelSize:
    """The sizes of the model `policy.model_name`. Leaves the process's random states unchanged."""
    import torch

    from rlframework.models.loading import auto_class, load_config

    with quiet_hub():
        found = load_config(config)
    with torch.random.fork_rng(devices=[]), torch.device("meta"), quiet_transformers():
        model = auto_class(found).from_config(found, dtype=torch.float32, trust_remote_code=config.trust_remote_code)

    def size(*names: str) -> int:
        return first_size(found.get_text_config(), *names) or 0

    def parameters_of(module: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    parameters = trained = parameters_of(model)
    if config.lora is not None:
        ends = tuple(f".{name}" for name in config.lora.target_modules)
        trained = sum(
            config.lora.rank * (module.in_features + module.out_features)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and f".{name}".endswith(ends)
        )
    # the most that a sharding engine gathers at once: a layer, or embedding and head
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    inside = {id(parameter) for blocks in lists for parameter in blocks.parameters()}
    outside = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in inside)
    hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    # the MLP width that one token passes through: of a mixture of experts, the total over its top-k experts
    intermediate = size("num_experts_per_tok") * size("moe_intermediate_size")
    return ModelSize(
        parameters=parameters,
        trained=trained,
        largest_block=max([outside, *(parameters_of(block) for blocks in lists for block in blocks)]),
        layers=size("num_hidden_layers", "n_layer"),
        hidden=hidden,
        intermediate=intermediate or size("intermediate_size", "n_inner") or 4 * hidden,
        key_value=(size("head_dim") or hidden // max(heads, 1)) * (size("num_key_value_heads") or heads),
        vocabulary=size("vocab_size"),
    )

"""The memory of a worker, by purpose and phase of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlframework.config.further_policies import FurtherPolicyConfig
from rlframework.config.sections import RunConfig
from rlframework_tools.estimates.model_size import ModelSize, Part
from rlframework_tools.estimates.row_sizes import Rows, microbatch_tokens
from rlframework_tools.estimates.state_layout import Phase, Place, PlannedWorker, State, StateLayout, compute_width

PROGRAM, GPU_PROGRAM, CUDA_CONTEXT = 400 << 20, 2 << 30, 600 << 20
"""Bytes of a process with PyTorch and transformers on a CPU, with CUDA's libraries, and of the context on its GPU."""

LOGITS_COPIES = 3
"""On a CPU: logits, tensor saved for the backward, gradient. Sampling: logits, probabilities, cumulative sums."""

DECODING_SHARE = 0.9
"""Share of the free memory of a GPU that the embedded engine decodes in: `rlframework_transformers.cache`."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one worker for one purpose, with their place and the phases of a step that need them.

    `least`: the bytes that it can do with, where it takes what is free; None: all of them.
    """

    name: str
    bytes: int
    place: Place
    phases: tuple[Phase, ...] = ("always",)
    least: int | None = None

    @property
    def needed(self) -> int:
        """The bytes without which it fails."""
        return self.bytes if self.least is None else self.least


def peak(uses: Sequence[MemoryUse], place: Place, *, least: bool = False) -> int:
    """The peak in bytes at `place`: everything permanent plus the largest phase. `least`: of what is needed."""
    sums: dict[Phase, int] = {"always": 0}
    for use in uses:
        for phase in use.phases if use.place == place else ():
            sums[phase] = sums.get(phase, 0) + (use.needed if least else use.bytes)
    return sums.pop("always") + max(sums.values(), default=0)


def worker_memory(
    config: RunConfig, layout: StateLayout, model: ModelSize, rows: Rows, worker: PlannedWorker, *, reference: bool
) -> list[MemoryUse]:
    """The memory of a worker, by purpose; with a pipeline, of the stage that needs most: the first or the last.

    `reference`: the run keeps a reference policy.
    """
    on: Place = "host" if worker.device == "cpu" else "device"
    stages = sorted({0, config.policy.parallelism.pipeline - 1})
    found = [_StageMemory(config, layout, model, rows, worker, stage).uses(reference=reference) for stage in stages]
    return max(found, key=lambda uses: peak(uses, on))


@dataclass(frozen=True)
class _StageMemory:
    """The memory of a worker of one pipeline stage."""

    config: RunConfig
    layout: StateLayout
    model: ModelSize
    rows: Rows
    worker: PlannedWorker
    stage: int

    def uses(self, *, reference: bool) -> list[MemoryUse]:
        """All uses that take bytes."""
        on_cpu = self.worker.device == "cpu"
        found = [
            MemoryUse("program", PROGRAM if on_cpu else GPU_PROGRAM, "host"),
            MemoryUse("CUDA context", 0 if on_cpu else CUDA_CONTEXT, "device"),
            *self._states(reference=reference),
            *self._training(),
        ]
        found += self._generation(sum(use.bytes for use in found if use.place == "device" and "always" in use.phases))
        return [replace(use, place="host" if on_cpu else use.place) for use in found if use.bytes]

    @property
    def _part(self) -> Part:
        return self.model.part(self.config.policy.parallelism, self.stage, splits_ends=self.layout.splits_ends)

    def _bytes_of(self, state: State) -> int:
        part = self._part
        share = self.model.trained / self.model.parameters if state.trained else 1.0
        experts = state.expert_shards or state.shards
        others = part.others if state.matrices else part.others - part.matrices
        return round(state.width * share * (others / state.shards + part.experts / experts))

    @property
    def _trains(self) -> bool:
        return getattr(self.config.policy, "trained", True)

    @property
    def _kept(self) -> Iterator[State]:
        """The states that exist; a further policy that is not trained has no gradients and no moments."""
        return (state for state in self.layout.states if self._trains or not state.trained)

    def _states(self, *, reference: bool) -> Iterator[MemoryUse]:
        for state in self._kept:
            yield MemoryUse(state.name, self._bytes_of(state), state.place, state.phases)
        if reference and self.config.policy.lora is None:
            weights = self._bytes_of(self.layout.states[0])
            yield MemoryUse("reference", weights, "host")
            yield MemoryUse("copy of the weights", weights, "host", ("scoring",))

    def _training(self) -> Iterator[MemoryUse]:
        layout, part, width = self.layout, self._part, compute_width(self.config)
        unit = part.unit if layout.gathered is None else min(layout.gathered, part.others + part.experts)
        # a tied head is gathered from the forward to the end of the backward, and so is its gradient
        tied = 2 * width * part.tied_end if layout.gathers else 0
        yield MemoryUse("weights and gradients of a unit", round(layout.transient * unit) + tied, "device", TRAINING)
        yield MemoryUse("buffers", layout.buffers, "device")
        yield MemoryUse("buffers of the backward", layout.training_buffers, "device", TRAINING)
        yield MemoryUse("activations", self._activations(width), "device", TRAINING)
        if self.stage == self.config.policy.parallelism.pipeline - 1 and self.config.policy.head == "language":
            yield MemoryUse("logits", self._logits(width), "device", TRAINING)

    def _activations(self, width: int) -> int:
        """Bytes that all layers of the stage save, and gradients of the layer that is in its backward."""
        parallelism, checkpointing = self.config.policy.parallelism, self.config.policy.activation_checkpointing
        shape, tensor, sequence = self.model.layer, parallelism.tensor, parallelism.sequence
        tokens = microbatch_tokens(self.config, self.rows, self.worker.device) // parallelism.context
        layer = shape.saved(width, tensor=tensor, sequence=sequence)
        kept = layer
        if checkpointing == "full":
            kept = width * shape.hidden / (tensor if sequence else 1)
        elif checkpointing == "selective":
            kept = shape.saved_products(width, tensor=tensor, sequence=sequence)
        if not self._trains:
            return round(tokens * layer)
        layers = -(-len(self.model.blocks) // parallelism.pipeline)
        in_flight = parallelism.pipeline - self.stage  # microbatches whose backward is to come, in a 1F1B schedule
        recomputed = layer if checkpointing else 0.0
        backward = shape.backward(width, tensor=tensor, checkpointed=bool(checkpointing))
        return round(tokens * (in_flight * layers * kept + recomputed + backward))

    def _logits(self, width: int) -> int:
        parallelism, on_cpu = self.config.policy.parallelism, self.worker.device == "cpu"
        tokens = microbatch_tokens(self.config, self.rows, self.worker.device) // parallelism.context
        columns = -(-self.model.vocabulary // (parallelism.tensor if self.layout.splits_ends else 1))
        elements = min(tokens * columns, logits_chunk(self.worker))
        return round(4 * elements * (LOGITS_COPIES if on_cpu else 1 + width / 4))  # on a GPU logits and their gradient

    def _generation(self, taken: int) -> Iterator[MemoryUse]:
        """Memory of the embedded engine, which decodes as many rows at once as a GPU has memory for beside `taken`."""
        further = isinstance(self.config.policy, FurtherPolicyConfig)
        if further or not self.rows.generated or self.config.generation.workers is not None:
            return
        width, batch = compute_width(self.config), decoding_batch(self.config, self.rows)
        copy = 0 if self.layout.shares_model else width * self.model.parameters
        cache = cache_bytes(self.model, width, self.rows.longest)
        sampling = LOGITS_COPIES * 4 * self.model.vocabulary
        adapts = self.worker.gpu_bytes is not None
        if self.worker.gpu_bytes is not None:
            free = self.worker.gpu_bytes - taken - copy
            batch = max(1, min(batch, int(DECODING_SHARE * free) // (cache + sampling)))
        least = (cache, sampling) if adapts else (None, None)  # those of a row
        yield MemoryUse("keys and values", batch * cache, "device", GENERATING, least[0])
        yield MemoryUse("sampling", batch * sampling, "device", GENERATING, least[1])
        yield MemoryUse("generation model", copy, "device")


TRAINING: tuple[Phase, ...] = ("training",)
GENERATING: tuple[Phase, ...] = ("generating",)


def logits_chunk(worker: PlannedWorker) -> int:
    """The most logits that the head holds at once; see `rlframework.policy.head.vocabulary.chunk_elements`."""
    from rlframework.policy.head.vocabulary import CHUNK_ELEMENTS, GPU_SHARE

    elements = CHUNK_ELEMENTS[worker.device]
    return elements if worker.gpu_bytes is None else min(elements, worker.gpu_bytes // GPU_SHARE)


def decoding_batch(config: RunConfig, rows: Rows) -> int:
    """The most rows that a worker decodes together."""
    replicas = max(1, config.worker_group.num_workers // config.policy.parallelism.model_size)
    return min(config.generation.batch_size, -(-rows.count // replicas))


def cache_bytes(model: ModelSize, width: int, tokens: int) -> int:
    """Bytes of the keys and values of `tokens` tokens; two layers' more while the cache grows layer by layer."""
    return (len(model.blocks) + 2) * 2 * tokens * model.layer.key_value * width

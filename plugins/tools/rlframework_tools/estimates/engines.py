"""Generation engines in processes of their own: the GPUs that they take, and the memory of each; and advice on how to
reduce the memory of a run that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlframework.config.sections import RunConfig
from rlframework.plugins.model_checks import WIDTHS
from rlframework.plugins.types import GenerationEngineRecord
from rlframework_tools.estimates.model_size import ModelSize
from rlframework_tools.estimates.row_sizes import Rows
from rlframework_tools.estimates.state_layout import Place, PlannedWorker
from rlframework_tools.estimates.worker_memory import (
    CUDA_CONTEXT,
    DECODING_SHARE,
    GPU_PROGRAM,
    LOGITS_COPIES,
    PROGRAM,
    MemoryUse,
    cache_bytes,
    peak,
)


@dataclass(frozen=True)
class Engines:
    """`count` engines on `gpus` GPUs each, and the least `memory` that each needs on one of them: to decode one row.

    `rows`: how many each decodes together, in what its GPUs have left. `shares`: their GPUs have workers of the policy
    too, because not both are placed by Ray.
    """

    count: int
    gpus: int
    memory: list[MemoryUse]
    rows: int
    shares: bool

    @property
    def device_bytes(self) -> int:
        """The least memory in bytes of a GPU of an engine."""
        return peak(self.memory, "device")

    @property
    def host_bytes(self) -> int:
        """Peak host memory in bytes of all engines."""
        return self.count * peak(self.memory, "host")

    def __str__(self) -> str:
        engines = "1 engine" if self.count == 1 else f"{self.count} engines"
        return engines if self.gpus == 1 else f"{engines} of {self.gpus} GPUs"


def engines_of(
    config: RunConfig,
    record: GenerationEngineRecord,
    staged: bool,
    model: ModelSize,
    rows: Rows,
    worker: PlannedWorker,
    *,
    beside: int,
    per_engine: int | None = None,
) -> Engines | None:
    """Estimate the engines of `generation.workers`; None if the run has none.

    `beside`: bytes of a worker of the policy on the same GPU, if they share it; `per_engine`: GPUs of each, None: as
    `record` says.
    """
    workers, generation = config.generation.workers, config.generation
    if workers is None:
        return None
    declared = 1 if record.gpus_per_engine is None else record.gpus_per_engine(generation)
    gpus, on_cpu = per_engine or declared, worker.device == "cpu"
    width = WIDTHS[config.policy.precision if generation.refit.dtype == "auto" else generation.refit.dtype]
    weights = -(-width * model.parameters // gpus)
    cache, sampling = -(-cache_bytes(model, width, rows.longest) // gpus), LOGITS_COPIES * 4 * model.vocabulary
    uses = [
        MemoryUse("program", 0 if workers.group == "inline" else PROGRAM if on_cpu else GPU_PROGRAM, "host"),
        MemoryUse("CUDA context", 0 if on_cpu else CUDA_CONTEXT, "device"),
        MemoryUse("weights", weights, "device"),
        MemoryUse("copy of the weights in an update", weights if staged and not on_cpu else 0, "device", ("updating",)),
        MemoryUse("keys and values of a row", cache, "device", ("generating",)),
        MemoryUse("sampling of a row", sampling, "device", ("generating",)),
    ]
    shares = not (config.worker_group.name == workers.group == "ray")
    most = min(generation.batch_size, -(-rows.count // workers.num_workers))
    if worker.gpu_bytes is not None and not on_cpu:
        left = worker.gpu_bytes - CUDA_CONTEXT - weights - (beside if shares else 0)
        most = max(0, min(most, int(DECODING_SHARE * left) // (cache + sampling)))
    memory = [MemoryUse(use.name, use.bytes, "host" if on_cpu else use.place, use.phases) for use in uses if use.bytes]
    return Engines(workers.num_workers, gpus, memory, most, shares)


def gpus_taken(config: RunConfig, further: Iterable[RunConfig], engines: Engines | None) -> int:
    """The GPUs that a run takes as its groups are placed.

    Ray reserves GPUs for each group. The workers of other groups begin at the first GPU, and so share GPUs.
    """
    groups = [(view.worker_group.name, view.worker_group.num_workers) for view in (config, *further)]
    if engines is not None and config.generation.workers is not None:
        groups.append((config.generation.workers.group, engines.count * engines.gpus))
    reserved = sum(number for name, number in groups if name == "ray")
    return max(reserved, max((number for name, number in groups if name != "ray"), default=0))


SEVERAL_GPUS = "give each engine several GPUs (generation.name=vllm, generation.vllm.tensor_parallel_size)"


def remedy(
    config: RunConfig, memory: Sequence[MemoryUse], place: Place, engines: Engines | None, gpu_bytes: int | None
) -> str:
    """Advice that reduces the largest uses at `place`, the largest first. `gpu_bytes`: the memory of a GPU, if known.

    `memory`: that of a worker; `engines`: those in processes of their own.
    """
    policy, sizes = config.policy, {use.name: use.needed for use in memory if use.place == place}
    moments = sizes.get("moments", 0) + sizes.get("second moments", 0)
    state = sum(sizes.get(name, 0) for name in ("weights", "main weights", "gradients")) + moments
    copy = sizes.get("generation model", 0)
    own = "generate in workers of their own (generation.workers)"
    if gpu_bytes is not None and copy > gpu_bytes:
        own = f"{own} and {SEVERAL_GPUS}"
    shared = engines.device_bytes if engines is not None and engines.shares and place == "device" else 0
    advice = {
        "set policy.activation_checkpointing=full": (policy.activation_checkpointing != "full")
        * sizes.get("activations", 0),
        "reduce the tokens of a microbatch (policy.batching.tokens)": sizes.get("activations", 0) - 1,
        "reduce generation.batch_size": sizes.get("keys and values", 0) + sizes.get("sampling", 0),
        own: copy,
        "give the engines GPUs without workers (worker_group.name=ray and generation.workers.group=ray)": shared,
        "use more workers": state if place == "device" else 0,
        "set policy.offload.optimizer=true": (not policy.offload.optimizer and place == "device") * moments,
        "train adapters (policy.lora)": (policy.lora is None) * state // 4,
        "reduce worker_group.num_workers": place == "host" and config.worker_group.num_workers > 1,
    }
    ranked = sorted((text for text, size in advice.items() if size > 0), key=lambda text: -advice[text])
    listed = ", or ".join(ranked[:4]) or "use a smaller model"
    return listed[0].upper() + listed[1:]


def engine_remedy(engines: Engines) -> str:
    """Advice that reduces the memory of an engine on each of its GPUs."""
    sizes = {use.name: use.bytes for use in engines.memory}
    shorter = (
        ", or reduce generation.max_new_tokens"
        if 2 * sizes.get("keys and values of a row", 0) > sizes["weights"]
        else ""
    )
    return f"{SEVERAL_GPUS[0].upper()}{SEVERAL_GPUS[1:]}{shorter}"

"""Advice on how to reduce the memory of a run that does not fit."""

from __future__ import annotations

from collections.abc import Sequence

from rlframework.config.sections import RunConfig
from rlframework_tools.estimates.engines import Engines
from rlframework_tools.estimates.state_layout import Place
from rlframework_tools.estimates.worker_memory import MemoryUse

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

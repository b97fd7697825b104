"""Constraints between configuration keys that hold for every choice of plugins."""

from __future__ import annotations

from collections.abc import Iterator

from rlframework.config.problems import Problem
from rlframework.config.sections import RunConfig


def check_run(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems in `config`."""
    yield from _check_workers(config)
    yield from _check_steps(config)
    yield from _check_generation(config)
    scheduler, checkpoints = config.policy.scheduler, config.checkpoints
    if scheduler.total_steps is not None and scheduler.warmup_steps > scheduler.total_steps:
        message = f"must not exceed policy.scheduler.total_steps, which is {scheduler.total_steps}"
        yield Problem("policy.scheduler.warmup_steps", message, given=scheduler.warmup_steps)
    if checkpoints.asynchronous and checkpoints.format != "sharded":
        message = (
            f"must be false when checkpoints.format is {checkpoints.format}, because all workers write it together"
        )
        yield Problem("checkpoints.asynchronous", message, "Set checkpoints.format to sharded.", given=True)
    if checkpoints.format != "portable" and config.policy.lora is not None:
        message = "must be portable with policy.lora: adapters are small, and are saved in no other format"
        yield Problem("checkpoints.format", message, given=checkpoints.format)


def _check_workers(config: RunConfig) -> Iterator[Problem]:
    workers, rows = config.worker_group.num_workers, config.policy.train_global_batch_size
    size = config.policy.parallelism.model_size
    if workers % size:
        message = (
            f"must be a multiple of {size}, the workers per model replica (policy.parallelism: tensor x context x "
            "pipeline)"
        )
        yield Problem("worker_group.num_workers", message, given=workers)
    elif rows % (data_parallel := workers // size):
        below = rows - rows % data_parallel
        near = f"{below} or {below + data_parallel}" if below else str(data_parallel)
        message = f"must be a multiple of {data_parallel}, the number of data-parallel workers"
        hint = f"Try {near}, or change worker_group.num_workers."
        yield Problem("policy.train_global_batch_size", message, hint, given=rows)


def _check_steps(config: RunConfig) -> Iterator[Problem]:
    profiler, last, workers = config.profiler, config.algorithm.num_steps, config.worker_group.num_workers
    given = {
        "recording.steps": config.recording.steps,
        "profiler.steps": profiler.steps,
        "profiler.start": (profiler.start or 0,),
        "profiler.stop": (profiler.stop or 0,),
    }
    for key, steps in given.items():
        if beyond := [step for step in steps if step > last]:
            message = f"must be steps of the run, 1 to {last} (algorithm.num_steps)"
            yield Problem(key, message, given=beyond[0] if len(beyond) == 1 else beyond)
    if profiler.stop is not None and profiler.stop < (profiler.start or profiler.stop + 1):
        needed = "profiler.start, which is not set" if profiler.start is None else f"profiler.start={profiler.start}"
        yield Problem("profiler.stop", f"must not be before {needed}", given=profiler.stop)
    if not profiler.ranks or max(profiler.ranks) >= workers:
        ranks = f"each from 0 to {workers - 1} (worker_group.num_workers={workers})"
        yield Problem("profiler.ranks", f"must list at least one worker rank, {ranks}", given=profiler.ranks)


def _check_generation(config: RunConfig) -> Iterator[Problem]:
    workers, lora = config.generation.workers, config.policy.lora
    if workers is None:
        if lora is not None and lora.refit == "adapters":
            reason = "generation.workers is not set, and generation runs in the trainer's own processes"
            yield Problem("policy.lora.refit", f"must be merged, because {reason}", given="adapters")
        return
    if workers.python is not None and workers.group != "ray":
        message = "needs workers started by Ray; other workers run this process's Python"
        hint = "Set generation.workers.group to ray."
        yield Problem("generation.workers.python", message, hint, given=workers.python)
    if workers.group == "inline" and workers.num_workers > 1:
        message = "must be 1 with generation.workers.group=inline, because the driver process holds a single engine"
        hint = "Set generation.workers.group to processes or ray."
        yield Problem("generation.workers.num_workers", message, hint, given=workers.num_workers)
    if workers.group == config.worker_group.name == "inline" and config.generation.refit.transport == "collective":
        message = "must be auto or ipc when trainer and engine are both inline: a process group needs several processes"
        yield Problem("generation.refit.transport", message, given="collective")

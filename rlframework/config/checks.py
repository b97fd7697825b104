"""Constraints between configuration keys that hold for every choice of plugins."""

from __future__ import annotations

from collections.abc import Iterator

from rlframework.config.policy import SchedulerConfig
from rlframework.config.problems import Problem
from rlframework.config.sections import RunConfig


def check_run(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems in `config`."""
    yield from _check_workers(config)
    yield from _check_scheduler(config.policy.scheduler)
    yield from _check_steps(config)
    yield from _check_generation(config)
    yield from _check_checkpoints(config)


def _check_workers(config: RunConfig) -> Iterator[Problem]:
    workers, size, rows = (
        config.worker_group.num_workers,
        config.policy.parallelism.model_size,
        config.policy.train_global_batch_size,
    )
    if workers % size:
        message = (
            f"must be a multiple of {size}, the workers per model replica (policy.parallelism: tensor x context x "
            "pipeline)"
        )
        yield Problem("worker_group.num_workers", message, given=workers)
    elif rows % (data_parallel := workers // size):
        below = rows - rows % data_parallel
        near = f"{below} or {below + data_parallel}" if below else str(data_parallel)
        yield Problem(
            "policy.train_global_batch_size",
            f"must be a multiple of {data_parallel}, the number of data-parallel workers",
            f"Try {near}, or change worker_group.num_workers.",
            given=rows,
        )


def _check_scheduler(scheduler: SchedulerConfig) -> Iterator[Problem]:
    if scheduler.total_steps is not None and scheduler.warmup_steps > scheduler.total_steps:
        message = f"must not exceed policy.scheduler.total_steps, which is {scheduler.total_steps}"
        yield Problem("policy.scheduler.warmup_steps", message, given=scheduler.warmup_steps)


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
        message = (
            f"must list at least one worker rank, each from 0 to {workers - 1} (worker_group.num_workers={workers})"
        )
        yield Problem("profiler.ranks", message, given=profiler.ranks)


def _check_generation(config: RunConfig) -> Iterator[Problem]:
    workers, lora = config.generation.workers, config.policy.lora
    if workers is None:
        if lora is not None and lora.refit == "adapters":
            message = (
                "must be merged when generation.workers is not set, because generation then runs in the trainer's own "
                "processes"
            )
            yield Problem("policy.lora.refit", message, given="adapters")
        return
    if workers.python is not None and workers.group != "ray":
        yield Problem(
            "generation.workers.python",
            "needs workers started by Ray; other workers run this process's Python",
            "Set generation.workers.group to ray.",
            given=workers.python,
        )
    if workers.group == "inline" and workers.num_workers > 1:
        yield Problem(
            "generation.workers.num_workers",
            "must be 1 with generation.workers.group=inline, because the driver process holds a single engine",
            "Set generation.workers.group to processes or ray.",
            given=workers.num_workers,
        )
    if workers.group == config.worker_group.name == "inline" and config.generation.refit.transport == "collective":
        message = (
            "must be auto or ipc when trainer and engine are both inline, because a process group needs several "
            "processes"
        )
        yield Problem("generation.refit.transport", message, given="collective")


def _check_checkpoints(config: RunConfig) -> Iterator[Problem]:
    given = config.checkpoints
    if given.asynchronous and given.format != "sharded":
        yield Problem(
            "checkpoints.asynchronous",
            f"must be false when checkpoints.format is {given.format}, because all workers write that format together",
            "Set checkpoints.format to sharded.",
            given=True,
        )
    if given.format != "portable" and config.policy.lora is not None:
        message = "must be portable with policy.lora: adapters are small, and are saved in no other format"
        yield Problem("checkpoints.format", message, given=given.format)

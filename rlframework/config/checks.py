"""Constraints between configuration keys that hold for every choice of plugins."""

from __future__ import annotations

from collections.abc import Iterator

from rlframework.config.findings import Finding
from rlframework.config.load import Tree
from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import RunConfig


def check_run(config: RunConfig, tree: Tree) -> Iterator[Finding]:
    """Yield the problems in `config`; `tree` records where each value was written."""
    policy, workers = config.policy, config.worker_group.num_workers
    size = policy.parallelism.model_size
    if workers % size:
        yield Finding(
            "worker_group.num_workers",
            f"must be a multiple of {size}, the workers per model replica (policy.parallelism: tensor x context x "
            f"pipeline)",
            workers,
            tree.origin(("worker_group", "num_workers")),
        )
    else:
        yield from _check_batch(policy, workers // size, tree)
    yield from _check_optimizer(policy, tree)
    yield from _check_scheduler(policy, tree)
    yield from _check_recording(config, tree)
    yield from _check_generation(config, tree)
    yield from _check_checkpoints(config, tree)
    if policy.lora is not None and policy.lora.refit == "adapters" and config.generation.workers is None:
        yield Finding(
            "policy.lora.refit",
            "must be merged when generation.workers is not set, because generation then runs in the trainer's own "
            "processes",
            "adapters",
            tree.origin(("policy", "lora", "refit")),
        )
    yield from _check_profiler(config, tree)


def _check_checkpoints(config: RunConfig, tree: Tree) -> Iterator[Finding]:
    given = config.checkpoints
    if given.asynchronous and given.format != "sharded":
        yield Finding(
            "checkpoints.asynchronous",
            f"must be false when checkpoints.format is {given.format}, because all workers write that format together",
            True,
            tree.origin(("checkpoints", "asynchronous")),
            hint="Set checkpoints.format to sharded.",
        )
    if given.format != "portable" and config.policy.lora is not None:
        yield Finding(
            "checkpoints.format",
            "must be portable with policy.lora: adapters are small, and are saved in no other format",
            given.format,
            tree.origin(("checkpoints", "format")),
        )


def _check_batch(policy: PolicyConfig, data_parallel: int, tree: Tree) -> Iterator[Finding]:
    rows = policy.train_global_batch_size
    below = rows - rows % data_parallel
    if below == rows:
        return
    near = f"{below} or {below + data_parallel}" if below else str(data_parallel)
    yield Finding(
        "policy.train_global_batch_size",
        f"must be a multiple of {data_parallel}, the number of data-parallel workers",
        rows,
        tree.origin(("policy", "train_global_batch_size")),
        hint=f"Try {near}, or change worker_group.num_workers.",
    )


def _check_optimizer(policy: PolicyConfig, tree: Tree) -> Iterator[Finding]:
    betas, eps = policy.optimizer.betas, policy.optimizer.eps
    if not all(0.0 <= beta < 1.0 for beta in betas):
        origin = tree.origin(("policy", "optimizer", "betas"))
        yield Finding("policy.optimizer.betas", "must be two numbers in the range 0 <= beta < 1", betas, origin)
    if not eps > 0.0:
        yield Finding(
            "policy.optimizer.eps", "must be greater than 0", eps, tree.origin(("policy", "optimizer", "eps"))
        )


def _check_scheduler(policy: PolicyConfig, tree: Tree) -> Iterator[Finding]:
    scheduler = policy.scheduler
    if scheduler.total_steps is not None and scheduler.warmup_steps > scheduler.total_steps:
        yield Finding(
            "policy.scheduler.warmup_steps",
            f"must not exceed policy.scheduler.total_steps, which is {scheduler.total_steps}",
            scheduler.warmup_steps,
            tree.origin(("policy", "scheduler", "warmup_steps")),
        )


def _check_recording(config: RunConfig, tree: Tree) -> Iterator[Finding]:
    last = config.algorithm.num_steps
    if beyond := [step for step in config.recording.steps if step > last]:
        yield Finding(
            "recording.steps",
            f"must be steps of the run, 1 to {last} (algorithm.num_steps)",
            beyond[0] if len(beyond) == 1 else beyond,
            tree.origin(("recording", "steps")),
        )


def _check_profiler(config: RunConfig, tree: Tree) -> Iterator[Finding]:
    section, last, workers = config.profiler, config.algorithm.num_steps, config.worker_group.num_workers
    among = f"must be steps of the run, 1 to {last} (algorithm.num_steps)"
    if beyond := [step for step in section.steps if step > last]:
        yield Finding(
            "profiler.steps", among, beyond[0] if len(beyond) == 1 else beyond, tree.origin(("profiler", "steps"))
        )
    for name in ("start", "stop"):
        step = getattr(section, name)
        if step is not None and step > last:
            yield Finding(f"profiler.{name}", among, step, tree.origin(("profiler", name)))
    if section.stop is not None and section.stop < (section.start or section.stop + 1):
        needed = "profiler.start, which is not set" if section.start is None else f"profiler.start={section.start}"
        yield Finding("profiler.stop", f"must not be before {needed}", section.stop, tree.origin(("profiler", "stop")))
    if not section.ranks or max(section.ranks) >= workers:
        allowed = (
            f"must list at least one worker rank, each from 0 to {workers - 1} (worker_group.num_workers={workers})"
        )
        yield Finding("profiler.ranks", allowed, list(section.ranks), tree.origin(("profiler", "ranks")))


def _check_generation(config: RunConfig, tree: Tree) -> Iterator[Finding]:
    workers = config.generation.workers
    if workers is None:
        return
    place = ("generation", "workers")
    if workers.python is not None and workers.group != "ray":
        yield Finding(
            "generation.workers.python",
            "needs workers started by Ray; other workers run this process's Python",
            workers.python,
            tree.origin((*place, "python")),
            hint="Set generation.workers.group to ray.",
        )
    if workers.group == "inline" and workers.num_workers > 1:
        yield Finding(
            "generation.workers.num_workers",
            "must be 1 with generation.workers.group=inline, because the driver process holds a single engine",
            workers.num_workers,
            tree.origin((*place, "num_workers")),
            hint="Set generation.workers.group to processes or ray.",
        )
    if workers.group == config.worker_group.name == "inline" and config.generation.refit.transport == "collective":
        yield Finding(
            "generation.refit.transport",
            "must be auto or ipc when trainer and engine are both inline, because a process group needs several "
            "processes",
            "collective",
            tree.origin(("generation", "refit", "transport")),
        )

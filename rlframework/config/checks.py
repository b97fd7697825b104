"""What must hold between keys of the configuration, whichever parts are chosen."""

from __future__ import annotations

from collections.abc import Iterator

from rlframework.config.findings import Finding
from rlframework.config.load import Tree
from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import RunConfig


def check_run(config: RunConfig, tree: Tree) -> Iterator[Finding]:
    """The problems of `config`; `tree` says where each value was written."""
    policy, workers = config.policy, config.worker_group.num_workers
    size = policy.parallelism.model_size
    if workers % size:
        yield Finding(
            "worker_group.num_workers",
            f"must divide by {size}, the workers that hold one model (policy.parallelism: tensor x context x pipeline)",
            workers,
            tree.origin(("worker_group", "num_workers")),
        )
    else:
        yield from _check_batch(policy, workers // size, tree)
    yield from _check_optimizer(policy, tree)
    yield from _check_scheduler(policy, tree)
    yield from _check_recording(config, tree)


def _check_batch(policy: PolicyConfig, data_parallel: int, tree: Tree) -> Iterator[Finding]:
    rows = policy.train_global_batch_size
    below = rows - rows % data_parallel
    if below == rows:
        return
    near = f"{below} or {below + data_parallel}" if below else str(data_parallel)
    yield Finding(
        "policy.train_global_batch_size",
        f"must divide by {data_parallel}, the number of workers that share the rows",
        rows,
        tree.origin(("policy", "train_global_batch_size")),
        hint=f"Try {near}, or another worker_group.num_workers.",
    )


def _check_optimizer(policy: PolicyConfig, tree: Tree) -> Iterator[Finding]:
    betas, eps = policy.optimizer.betas, policy.optimizer.eps
    if not all(0.0 <= beta < 1.0 for beta in betas):
        origin = tree.origin(("policy", "optimizer", "betas"))
        yield Finding("policy.optimizer.betas", "must be two numbers, each at least 0 and less than 1", betas, origin)
    if not eps > 0.0:
        yield Finding(
            "policy.optimizer.eps", "must be greater than 0", eps, tree.origin(("policy", "optimizer", "eps"))
        )


def _check_scheduler(policy: PolicyConfig, tree: Tree) -> Iterator[Finding]:
    scheduler = policy.scheduler
    if scheduler.total_steps is not None and scheduler.warmup_steps > scheduler.total_steps:
        yield Finding(
            "policy.scheduler.warmup_steps",
            f"must not be more than policy.scheduler.total_steps, which is {scheduler.total_steps}",
            scheduler.warmup_steps,
            tree.origin(("policy", "scheduler", "warmup_steps")),
        )


def _check_recording(config: RunConfig, tree: Tree) -> Iterator[Finding]:
    last = config.algorithm.num_steps
    if beyond := [step for step in config.recording.steps if step > last]:
        yield Finding(
            "recording.steps",
            f"must be among the steps of the run, which are 1 to {last} (algorithm.num_steps)",
            beyond[0] if len(beyond) == 1 else beyond,
            tree.origin(("recording", "steps")),
        )

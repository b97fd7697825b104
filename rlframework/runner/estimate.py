"""Estimate a run's memory per worker, disk and tokens per step, and warn of what does not fit this machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.configure import resolve_device
from rlframework.datasets.rendering import render_prompt, render_samples
from rlframework.datasets.tokens import TokenData
from rlframework.errors import DataError
from rlframework.huggingface.model_directories import model_positions
from rlframework.observers.host import Gpu, available_memory, free_disk, gpus
from rlframework.runner.memory import MemoryUse, Place, Rows, model_size, peak, worker_memory
from rlframework.training.input_checks import characters

if TYPE_CHECKING:
    from rich.table import Table

    from rlframework.algorithm import Parts
    from rlframework.config.sections import RunConfig
    from rlframework.interfaces.environment import Sample

_LOG = logging.getLogger(__name__)

CHECKPOINT_BYTES = 12
"""Bytes per parameter in a checkpoint: weight and two moments in fp32."""

MARGIN = 1.1
"""Factor on the memory estimate before it is compared with free memory: measured peaks exceed it by up to this."""

RENDERED, LONGEST = 256, 16
"""Of the samples, this many are rendered at even distances, and the longest by characters if they are a list."""


@dataclass(frozen=True)
class Machine:
    """Free memory and disk in bytes; None if unknown."""

    memory: int | None
    disk: int | None
    gpus: Sequence[Gpu] = ()

    @classmethod
    def here(cls, output_dir: Path, device: str) -> Machine:
        """The current state of this machine."""
        return cls(available_memory(), free_disk(output_dir), gpus() if device == "cuda" else ())


@dataclass(frozen=True)
class Estimate:
    """The estimate of a run. `disk`: bytes by purpose; `output_dir_problem`: why the run cannot start there."""

    parameters: int
    workers: int
    device: str
    memory: list[MemoryUse]
    disk: dict[str, int]
    rows: Rows
    machine: Machine
    output_dir: Path
    output_dir_problem: str | None = None

    @property
    def host_bytes(self) -> int:
        """Peak memory in bytes of all workers on this machine."""
        return self.workers * peak(self.memory, "host")

    def lines(self) -> list[str]:
        """The lines that a run prints at its start."""
        place: Place = "host" if self.device == "cpu" else "device"
        parts = ", ".join(f"{part.name} {gib(part.bytes)}" for part in self.memory if part.place == place)
        most = gib(peak(self.memory, place))
        several = f" ({self.workers} workers)" if self.workers > 1 else ""
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
        memory, disk = self.machine.memory, self.machine.disk
        remedy = "Reduce the tokens of a microbatch (policy.batching.tokens) or the model"
        if memory is not None and MARGIN * self.host_bytes > memory:
            found.append(
                f"the run may need {gib(self.host_bytes)} GiB of memory, and {gib(memory)} GiB are free. "
                f"{remedy}, or generation.batch_size, or worker_group.num_workers"
            )
        needed, free = peak(self.memory, "device"), min((gpu.free_bytes for gpu in self.machine.gpus), default=None)
        if free is not None and MARGIN * needed > free:
            found.append(
                f"a worker may need {gib(needed)} GiB of its GPU, and {gib(free)} GiB are free. {remedy}, "
                "set policy.activation_checkpointing=true, or use more workers"
            )
        written = sum(self.disk.values())
        if disk is not None and written > disk:
            found.append(
                f"the run may write {gib(written)} GiB, and {gib(disk)} GiB are free at output_dir="
                f"{str(self.output_dir)!r}. Free some space, write somewhere else, or keep fewer checkpoints "
                "(checkpoints.keep_last)"
            )
        return [f"warning: {text}" for text in (*found, self.output_dir_problem) if text is not None]

    def table(self) -> Table:
        """All figures as a table, for `--dry-run`."""
        from rich.table import Table

        table = Table("What", "When", title="Estimate", title_justify="left")
        table.add_column("GiB", justify="right")
        places: tuple[Place, ...] = ("device", "host")
        for place in places:
            parts = [part for part in self.memory if part.place == place]
            where = "GPU" if place == "device" else "RAM"
            for part in parts:
                table.add_row(f"{where} of a worker: {part.name}", part.phase, gib(part.bytes))
            if parts:
                table.add_row(f"{where} of a worker, at its peak", "", gib(peak(self.memory, place)))
        table.add_row(f"RAM of all {self.workers} workers", "peak", gib(self.host_bytes))
        table.add_row("RAM, free", "now", gib(self.machine.memory))
        for number, gpu in enumerate(self.machine.gpus):
            table.add_row(f"GPU {number} ({gpu.name}), free", "now", gib(gpu.free_bytes))
        for name, size in self.disk.items():
            table.add_row(f"disk: {name}", "", gib(size))
        table.add_row("disk, free", "now", gib(self.machine.disk))
        table.add_row("tokens generated per step, at most", f"{self.rows.generated:,}", "")
        table.add_row("tokens trained on per step", f"{self.rows.trained:,}", "")
        return table


def estimate(parts: Parts, reference: bool, machine: Machine | None = None) -> Estimate:
    """Estimate the run of `parts`, which needs no workers. `reference`: the run keeps a reference policy."""
    config = parts.config
    device, model, rows = resolve_device(config.device), model_size(config.policy), rows_of(parts)
    return Estimate(
        parameters=model.parameters,
        workers=config.worker_group.num_workers,
        device=device,
        memory=worker_memory(config, model, rows, device, reference),
        disk=disk(config, model.parameters, model.trained),
        rows=rows,
        machine=machine or Machine.here(config.output_dir, device),
        output_dir=config.output_dir,
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
    found = {"trained model": 4 * parameters}
    steps, section = config.algorithm.num_steps, config.checkpoints
    checkpoints = min(section.keep_last + section.keep_best + 1, steps // section.every) if section.every else 0
    if checkpoints:
        found[f"{checkpoints} checkpoints"] = checkpoints * CHECKPOINT_BYTES * trained
    every = config.recording.every
    recorded = len({*config.recording.steps, *(range(every, steps + 1, every) if every else ())})
    if recorded:
        found[f"{recorded} recorded steps"] = recorded * 4 * parameters
    return found


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
    prompts = getattr(algorithm, "prompts_per_step", None)
    if prompts is not None:
        lengths = [len(render_prompt(parts.tokenizer, sample.messages)) for sample in _selected(parts)]
        limit = model_positions(policy.model_name, policy.trust_remote_code) or max(lengths) + answer
        rows = [min(length + answer, limit) for length in lengths]
        count = prompts * getattr(algorithm, "samples_per_prompt", 1)
        return Rows(count, sum(rows) / len(rows), max(rows), generated=count * answer)
    if getattr(algorithm, "token_data", None) is not None:
        lengths = TokenData(algorithm.token_data).lengths.tolist()
    else:
        how: Any = getattr(algorithm, "train_on", "all"), getattr(algorithm, "max_tokens", None)
        lengths = [len(ids) for ids, _ in render_samples(parts.tokenizer, _selected(parts), *how)]
    return Rows(policy.train_global_batch_size, sum(lengths) / len(lengths), max(lengths))


def _selected(parts: Parts) -> list[Sample]:
    samples = parts.environment.samples("train")
    if not len(samples):
        raise DataError("the environment has no train samples")
    step = max(1, -(-len(samples) // RENDERED))
    chosen = [samples[number] for number in range(0, len(samples), step)]
    if isinstance(samples, (list, tuple)):
        chosen += sorted(samples, key=characters, reverse=True)[:LONGEST]
    return chosen

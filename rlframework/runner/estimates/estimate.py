"""Estimate a run's memory per worker, disk and tokens per step, and warn of what does not fit this machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlframework.configure import resolve_device
from rlframework.errors import DataError
from rlframework.observers.host import Gpu, available_memory, free_disk, gpus
from rlframework.runner.estimates.memory import MemoryUse, Place, peak, worker_memory
from rlframework.runner.estimates.model import model_size
from rlframework.runner.estimates.rows import Rows, rows_of

if TYPE_CHECKING:
    from rich.table import Table

    from rlframework.algorithm import Parts
    from rlframework.config.sections import RunConfig

_LOG = logging.getLogger(__name__)

CHECKPOINT_BYTES = 12
"""Bytes per parameter in a checkpoint: weight and two moments in fp32."""

MARGIN = 1.1
"""Factor on the memory estimate before it is compared with free memory: measured peaks exceed it by up to this."""


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
        folder = [] if self.output_dir_problem is None else [f"warning: {self.output_dir_problem}"]
        return [*self._memory_warnings(), *self._disk_warnings(), *folder]

    def table(self) -> Table:
        """All figures as a table, for `--dry-run`."""
        from rich.table import Table

        table = Table(title="Estimate", title_justify="left")
        for heading in ("What", "When", "GiB"):
            table.add_column(heading, justify="right" if heading == "GiB" else "left")
        for what, when, size in self._table_rows():
            table.add_row(what, when, size)
        return table

    def _table_rows(self) -> Iterator[tuple[str, str, str]]:
        places: tuple[Place, ...] = ("device", "host")
        for place in places:
            parts = [part for part in self.memory if part.place == place]
            where = "GPU" if place == "device" else "RAM"
            for part in parts:
                yield f"{where} of a worker: {part.name}", part.phase, gib(part.bytes)
            if parts:
                yield f"{where} of a worker, at its peak", "", gib(peak(self.memory, place))
        memory, disk = self.machine.memory, self.machine.disk
        yield f"RAM of all {self.workers} workers", "peak", gib(self.host_bytes)
        yield "RAM, free", "now", "?" if memory is None else gib(memory)
        for number, gpu in enumerate(self.machine.gpus):
            yield f"GPU {number} ({gpu.name}), free", "now", gib(gpu.free_bytes)
        for name, size in self.disk.items():
            yield f"disk: {name}", "", gib(size)
        yield "disk, free", "now", "?" if disk is None else gib(disk)
        yield "tokens generated per step, at most", f"{self.rows.generated:,}", ""
        yield "tokens trained on per step", f"{self.rows.trained:,}", ""

    def _memory_warnings(self) -> Iterator[str]:
        remedy = "Reduce the tokens of a microbatch (policy.batching.tokens) or the model"
        memory = self.machine.memory
        if memory is not None and MARGIN * self.host_bytes > memory:
            yield (
                f"warning: the run may need {gib(self.host_bytes)} GiB of memory, and {gib(memory)} GiB are free. "
                f"{remedy}, or generation.batch_size, or worker_group.num_workers"
            )
        needed, free = peak(self.memory, "device"), min((gpu.free_bytes for gpu in self.machine.gpus), default=None)
        if free is not None and MARGIN * needed > free:
            yield (
                f"warning: a worker may need {gib(needed)} GiB of its GPU, and {gib(free)} GiB are free. {remedy}, "
                "set policy.activation_checkpointing=true, or use more workers"
            )

    def _disk_warnings(self) -> Iterator[str]:
        needed, free = sum(self.disk.values()), self.machine.disk
        if free is not None and needed > free:
            yield (
                f"warning: the run may write {gib(needed)} GiB, and {gib(free)} GiB are free at output_dir="
                f"{str(self.output_dir)!r}. Free some space, write somewhere else, or keep fewer checkpoints "
                "(checkpoints.keep_last)"
            )


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


def disk(config: RunConfig, parameters: int, trained: int | None = None) -> dict[str, int]:
    """The most bytes that the run has on disk at once, by purpose.

    Includes the checkpoint being written, besides those that are kept. `trained` is the number of parameters in a
    checkpoint (None: all).
    """
    found = {"trained model": 4 * parameters}
    checkpoints = _checkpoints(config)
    if checkpoints:
        kept = parameters if trained is None else trained
        found[f"{checkpoints} checkpoints"] = checkpoints * CHECKPOINT_BYTES * kept
    recorded = _recorded(config)
    if recorded:
        found[f"{recorded} recorded steps"] = recorded * 4 * parameters
    return found


def gib(size: int) -> str:
    """Format bytes in GiB with two or three significant digits."""
    value = size / 2**30
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _checkpoints(config: RunConfig) -> int:
    """The most checkpoints on disk at once: those kept and the one being written; 0 without `every`."""
    section = config.checkpoints
    if not section.every:
        return 0
    return min(section.keep_last + section.keep_best + 1, config.algorithm.num_steps // section.every)


def _recorded(config: RunConfig) -> int:
    steps, every = config.algorithm.num_steps, config.recording.every
    multiples = range(every, steps + 1, every) if every else ()
    return len({*config.recording.steps, *multiples})

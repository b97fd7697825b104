"""Estimate a run's memory per worker, disk and tokens per step, and warn of what does not fit.

Parameters are counted on the meta device; what the engine keeps for each is declared by its plugin (the hook
`rlframework_state_layout`); activations are those of a Llama, Qwen or Qwen-MoE layer. Allocator overhead is not
counted. docs/memory.md says how the parts were checked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from rlframework.config.sections import RunConfig
from rlframework.observers.host import Gpu, available_memory, free_disk, gpus
from rlframework.plugins.configure import resolve_device
from rlframework.plugins.manager import PluginManager
from rlframework.plugins.types import GenerationEngineRecord
from rlframework.runner.parts import algorithm_class, engine_record
from rlframework_tools.estimates.disk import disk, gib
from rlframework_tools.estimates.engines import Engines, engine_remedy, engines_of, gpus_taken, remedy
from rlframework_tools.estimates.model_size import model_size
from rlframework_tools.estimates.plan import PlannedGpus
from rlframework_tools.estimates.row_sizes import Rows, optimizer_steps, rows_of
from rlframework_tools.estimates.state_layout import Place, PlannedWorker, StateLayout, assumed_layout
from rlframework_tools.estimates.worker_memory import MemoryUse, peak, worker_memory

if TYPE_CHECKING:
    from rich.table import Table

    from rlframework.rollout.parts import Parts

_LOG = logging.getLogger(__name__)

PLACES: dict[Place, str] = {"device": "GPU", "host": "RAM"}

MARGIN = 1.1
"""Factor on the memory estimate before it is compared with free memory: measured peaks exceed it by up to this."""

LITTLE = 0.1
"""Fraction of free memory or disk below which a run does not print what it needs."""


@dataclass(frozen=True)
class Estimate:
    """The estimate of a run. Free memory and disk are in bytes, and None if unknown.

    `disk`: bytes by purpose; `gpus`: those of this machine, or of the `planned` ones; `notes`: assumptions;
    `output_dir_problem`: why the run cannot start in its `output_dir`; `further`: those of further policies; `engines`:
    those of `generation.workers`, None if there are none.
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
    planned: PlannedGpus | None = None
    notes: tuple[str, ...] = ()
    output_dir_problem: str | None = None
    further: Mapping[str, Estimate] = field(default_factory=dict)
    engines: Engines | None = None

    @property
    def host_bytes(self) -> int:
        """Peak memory in bytes of all workers and engines on this machine, with those of further policies."""
        own = self.config.worker_group.num_workers * peak(self.memory, "host")
        engines = 0 if self.engines is None else self.engines.host_bytes
        return own + engines + sum(each.host_bytes for each in self.further.values())

    @property
    def taken(self) -> int:
        """The GPUs that the run takes."""
        return gpus_taken(self.config, (each.config for each in self.further.values()), self.engines)

    @property
    def engine_bytes(self) -> int:
        """The least memory in bytes of a GPU that has an engine and no worker; 0 if there is none."""
        return 0 if self.engines is None or self.engines.shares else self.engines.device_bytes

    @property
    def device_bytes(self) -> int:
        """Peak memory in bytes of the fullest GPU with workers.

        Ray places each policy on GPUs of its own. Otherwise a GPU has a worker of each, and engines that share it;
        policies that are offloaded take turns.
        """
        return self._fullest(least=False)

    @property
    def needed_bytes(self) -> int:
        """Of `device_bytes` what is needed: embedded engines decode as many rows as fit, and need room for one."""
        return self._fullest(least=True)

    def _fullest(self, *, least: bool) -> int:
        ray = self.config.worker_group.name == "ray"
        own = {name for name, each in self.further.items() if ray and each.config.worker_group.name == "ray"}
        return max([self._shared_bytes(own, least=least), *(self.further[name].device_bytes for name in own)])

    def _shared_bytes(self, elsewhere: set[str], *, least: bool) -> int:
        """Bytes on a GPU of the policy's workers, without the further policies that are `elsewhere`."""
        sizes = {name: each.device_bytes for name, each in self.further.items() if name not in elsewhere}
        engine = self.engines.device_bytes if self.engines is not None and self.engines.shares else 0
        idle = {name for name, section in self.config.further_policies.items() if section.offload_when_idle}
        resting = max((size for name, size in sizes.items() if name in idle), default=0)
        present = sum(size for name, size in sizes.items() if name not in idle)
        return peak(self.memory, "device", least=least) + engine + resting + present

    @property
    def _place(self) -> Place:
        return "host" if self.device == "cpu" else "device"

    def lines(self, *, brief: bool = False) -> list[str]:
        """The estimate as lines of text; `brief`: as a run prints them, memory and disk only where they matter."""
        disk = ", ".join(f"{name} {gib(size)}" for name, size in self.disk.items())
        shows_disk = not brief or _is_much(sum(self.disk.values()), self.free_disk)
        step = f"a step {self._step}"
        lines = [f"disk in GiB: {disk}; {step}" if shows_disk else step, *self.notes]
        if not brief or self._memory_is_much:
            lines[:0] = [
                self._needs,
                *self._engine_lines(),
                *(f"{name}: {each._needs}" for name, each in self.further.items()),
            ]
        return [f"estimate: {line}" for line in lines]

    @property
    def _memory_is_much(self) -> bool:
        free = min((gpu.free_bytes for gpu in self.gpus), default=None)
        on_gpus = self.device != "cpu" and _is_much(max(self.needed_bytes, self.engine_bytes), free)
        return on_gpus or _is_much(self.host_bytes, self.free_memory)

    @property
    def _needs(self) -> str:
        """The parameters and the peak of a worker, in words."""
        parts = ", ".join(f"{part.name} {gib(part.bytes)}" for part in self.memory if part.place == self._place)
        most = gib(peak(self.memory, self._place))
        workers = self.config.worker_group.num_workers
        several = f" ({workers} workers)" if workers > 1 else ""
        return f"{self.parameters:,} parameters; a worker{several} needs about {most} GiB at its peak: {parts}"

    def _engine_lines(self) -> list[str]:
        if self.engines is None:
            return []
        place: Place = self._place
        return [f"{self.engines}: each needs at least {gib(peak(self.engines.memory, place))} GiB"]

    @property
    def _step(self) -> str:
        """The tokens of a step in words. Those that environments or agents add to episodes are not known."""
        rows = self.rows
        if not rows.generated:
            return f"trains on about {rows.trained:,}"
        if rows.turns > 1:
            return (
                f"generates up to {rows.generated:,} tokens, in episodes of up to {rows.turns} turns, and trains on "
                "these with their prompts and observations"
            )
        return f"generates up to {rows.generated:,} tokens and trains on up to {rows.trained:,}"

    @property
    def fits(self) -> bool:
        """Whether planned GPUs are enough in number, and have the memory that is needed at least."""
        assert self.planned is not None
        needed = max(self.needed_bytes, self.engine_bytes)
        return self.taken <= self.planned.count and needed <= self.planned.memory_bytes

    def verdict(self) -> str:
        """One line that says whether workers and engines fit; for GPUs that a run is planned for."""
        assert self.planned is not None
        needed, have = max(self.needed_bytes, self.engine_bytes), self.planned.memory_bytes
        fits = "fits" if MARGIN * needed <= have else "may not fit" if self.fits else "does not fit"
        if self.taken > self.planned.count:
            return f"does not fit on {self.planned}: {self._takers()} take {self.taken} GPUs"
        where = "on each GPU"
        if self.engine_bytes:
            where = f"on each GPU that trains, and at least {gib(self.engine_bytes)} on each that generates"
        more = f"; generation takes up to {gib(self.device_bytes)} if they are free, to decode more rows at a time"
        rows = more if self.needed_bytes < self.device_bytes else ""
        return (
            f"{fits} on {self.planned}: about {gib(self.needed_bytes)} of {gib(have)} GiB are needed {where}, by "
            f"counting; warnings start at {MARGIN} times that{rows}"
        )

    def idle_gpus(self) -> str | None:
        """A note on planned GPUs that the run leaves idle; None if there are none."""
        if self.planned is None or self.taken >= self.planned.count:
            return None
        left, takers = self.planned.count - self.taken, self._takers()
        leave = "leaves" if takers == "1 worker" else "leave"
        return f"note: {takers} {leave} {left} of the {self.planned.count} GPUs idle"

    def _takers(self) -> str:
        """All workers and engines, as text."""
        workers = sum(each.config.worker_group.num_workers for each in (self, *self.further.values()))
        counted = "1 worker" if workers == 1 else f"{workers} workers"
        return counted if self.engines is None else f"{counted} and {self.engines}"

    def warnings(self) -> list[str]:
        """One line per problem; empty if everything fits."""
        found: list[str] = []
        if self.free_memory is not None and MARGIN * self.host_bytes > self.free_memory:
            found.append(
                f"the run may need {gib(self.host_bytes)} GiB of memory, and {gib(self.free_memory)} GiB are free. "
                f"{remedy(self.config, self.memory, 'host', self.engines, None)}"
            )
        needed, free = self.needed_bytes, min((gpu.free_bytes for gpu in self.gpus), default=None)
        if free is not None and MARGIN * needed > free:
            several = self.further or (self.engines is not None and self.engines.shares)
            found.append(
                f"{'the workers and engines on a GPU' if several else 'a worker'} may need {gib(needed)} GiB of "
                f"{'it' if several else 'its GPU'}, and {gib(free)} GiB are free. "
                f"{remedy(self.config, self.memory, 'device', self.engines, free)}"
            )
        if self.engines is not None and free is not None and MARGIN * self.engine_bytes > free:
            found.append(
                f"an engine may need {gib(self.engine_bytes)} GiB of each of its GPUs to decode a single row, and "
                f"{gib(free)} GiB are free. {engine_remedy(self.engines)}"
            )
        if self.planned is not None and self.taken > self.planned.count:
            found.append(
                f"{self._takers()} take {self.taken} GPUs, of {self.planned.count} that are planned. Reduce "
                "worker_group.num_workers or generation.workers.num_workers, or plan for more GPUs"
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
            _add_uses(table, self.memory, place, f"{where} of a worker", "at its peak")
        if self.engines is not None:
            _add_uses(table, self.engines.memory, self._place, f"{PLACES[self._place]} of an engine", "at least")
            table.add_row("rows that an engine decodes together, at most", f"{self.engines.rows:,}", "")
        for name, each in self.further.items():
            for place, where in PLACES.items():
                if most := peak(each.memory, place):
                    table.add_row(f"{where} of a worker of {name}, at its peak", "", gib(most))
        table.add_row(f"RAM of {self._takers()}", "peak", gib(self.host_bytes))
        if self.planned is None:
            table.add_row("RAM, free", "now", gib(self.free_memory))
        for number, gpu in enumerate(self.gpus):
            when = "now" if self.planned is None else "planned"
            table.add_row(f"GPU {number} ({gpu.name}), free", when, gib(gpu.free_bytes))
        for name, size in self.disk.items():
            table.add_row(f"disk: {name}", "", gib(size))
        if self.planned is None:
            table.add_row("disk, free", "now", gib(self.free_disk))
        if self.planned is not None:
            table.add_row(f"GPUs, of {self.planned.count}", f"{self.taken:,}", "")
        table.add_row("tokens generated per step, at most", f"{self.rows.generated:,}", "")
        bound = ", at most, if an episode is one row" if self.rows.turns > 1 and self.rows.limit else ""
        table.add_row(f"tokens trained on per step{bound}", f"{self.rows.trained:,}", "")
        if self.rows.generated:
            steps = optimizer_steps(self.config)
            rows = self.config.policy.train_global_batch_size
            table.add_row(f"optimizer steps per step, of {rows:,} rows each", f"{steps:,}", "")
        return table


def _add_uses(table: Table, memory: Sequence[MemoryUse], place: Place, whose: str, when: str) -> None:
    """Add the uses of memory at `place` and their peak, unless there are none."""
    for use in memory:
        if use.place == place:
            table.add_row(f"{whose}: {use.name}", ", ".join(use.phases), gib(use.bytes))
    if most := peak(memory, place):
        table.add_row(f"{whose}, {when}", "", gib(most))


def _is_much(size: int, free: int | None) -> bool:
    """Whether `size` is more than a small part of what is free, or that is not known."""
    return free is None or size >= LITTLE * free


def estimate(parts: Parts, manager: PluginManager, *, planned: PlannedGpus | None = None) -> Estimate:
    """Estimate the run of `parts`, which needs no workers; see `estimate_rows`."""
    further = {name: model.config for name, model in parts.models.items()}
    return estimate_models(parts.config, manager, rows_of(parts), further, planned=planned)


def estimate_models(
    config: RunConfig,
    manager: PluginManager,
    rows: Rows,
    further: Mapping[str, RunConfig],
    *,
    planned: PlannedGpus | None = None,
    notes: tuple[str, ...] = (),
) -> Estimate:
    """Estimate a run with its `further` policies: the configuration of each. See `estimate_rows`."""
    others = {
        name: estimate_rows(view, manager, rows, reference=False, planned=planned) for name, view in further.items()
    }
    reference = algorithm_class(config, manager).needs_reference_model(config.algorithm)
    engine = engine_record(config, manager)
    found = estimate_rows(config, manager, rows, reference=reference, engine=engine, planned=planned, notes=notes)
    written = {f"{name}: {what}": size for name, each in others.items() for what, size in each.disk.items()}
    return replace(found, further=others, disk=found.disk | written)


def estimate_rows(
    config: RunConfig,
    manager: PluginManager,
    rows: Rows,
    *,
    reference: bool,
    engine: GenerationEngineRecord | None = None,
    planned: PlannedGpus | None = None,
    notes: tuple[str, ...] = (),
) -> Estimate:
    """Estimate a run that trains on `rows`.

    `reference`: it keeps a reference policy; `engine`: that of `generation.workers`, None: they are not counted;
    `planned`: GPUs to plan for, None: this machine.
    """
    device, model = resolve_device(config.device), model_size(config.policy)
    present = gpus() if device == "cuda" and planned is None else ()
    memory_of_each = planned.memory_bytes if planned else min((gpu.memory_bytes for gpu in present), default=None)
    worker = PlannedWorker(device, model.trained, memory_of_each)
    layout = layout_of(config, manager, worker)
    if planned is not None:
        present = [Gpu(planned.name, planned.memory_bytes, planned.memory_bytes)]
    if layout.assumed:
        note = (
            f"the backend {config.policy.backend!r} does not say what it keeps on a worker; assumed: fp32 "
            "weights, gradients and moments sharded over all workers, as FSDP does"
        )
        notes = (*notes, note)
    memory = worker_memory(config, layout, model, rows, worker, reference=reference)
    engines = None
    if engine is not None:
        own = None if planned is None else planned.per_engine
        staged = bool(
            manager.call_first("rlframework_weights_are_staged", lambda hook: hook(generation=config.generation))
        )
        engines = engines_of(config, engine, staged, model, rows, worker, beside=peak(memory, "device"), per_engine=own)
    return Estimate(
        config=config,
        device=device,
        parameters=model.parameters,
        memory=memory,
        disk=disk(config, model.parameters, model.trained),
        rows=rows,
        free_memory=available_memory() if planned is None else None,
        free_disk=free_disk(config.output_dir) if planned is None else None,
        gpus=present,
        planned=planned,
        notes=notes,
        engines=engines,
    )


def layout_of(config: RunConfig, manager: PluginManager, worker: PlannedWorker) -> StateLayout:
    """The state that the backend keeps on a worker, as its plugin says or as is assumed."""
    declared = manager.call_first("rlframework_state_layout", lambda hook: hook(config=config, worker=worker))
    return assumed_layout(config, worker) if declared is None else cast("StateLayout", declared)

"""Estimate a run's memory per worker, disk and tokens per step, and warn of what does not fit.

Parameters are counted on the meta device; what the engine keeps for each is declared by its backend
(`rlframework.plugins.state_layout`); activations are those of a Llama, Qwen or Qwen-MoE layer. Allocator overhead is
not counted. docs/memory.md says how the parts were checked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from rlframework.config.further_policies import FurtherPolicyConfig
from rlframework.config.sections import RunConfig
from rlframework.configure import resolve_device
from rlframework.errors import DataError
from rlframework.estimates.hardware import PlannedGpus
from rlframework.estimates.model_size import model_size
from rlframework.estimates.rows import Rows, rows_of
from rlframework.estimates.worker_memory import MemoryUse, peak, worker_memory
from rlframework.observers.host import Gpu, available_memory, free_disk, gpus
from rlframework.plugins.state_layout import Place, PlannedWorker, StateLayout, assumed_layout
from rlframework.plugins.types import PolicyWorkerRecord

if TYPE_CHECKING:
    from rich.table import Table

    from rlframework.algorithm import Parts

_LOG = logging.getLogger(__name__)

PLACES: dict[Place, str] = {"device": "GPU", "host": "RAM"}

CHECKPOINT_BYTES = 12
"""Bytes per parameter in a checkpoint: weight and two moments in fp32."""

MARGIN = 1.1
"""Factor on the memory estimate before it is compared with free memory: measured peaks exceed it by up to this."""


@dataclass(frozen=True)
class Estimate:
    """The estimate of a run. Free memory and disk are in bytes, and None if unknown.

    `disk`: bytes by purpose; `gpus`: those of this machine, or of the `planned` ones; `notes`: assumptions;
    `output_dir_problem`: why the run cannot start in its `output_dir`; `further`: those of further policies.
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

    @property
    def host_bytes(self) -> int:
        """Peak memory in bytes of all workers on this machine, with those of further policies."""
        own = self.config.worker_group.num_workers * peak(self.memory, "host")
        return own + sum(each.host_bytes for each in self.further.values())

    @property
    def device_bytes(self) -> int:
        """Peak memory in bytes of a GPU that has a worker of each policy; those that are offloaded take turns."""
        sizes = {name: each.device_bytes for name, each in self.further.items()}
        idle = {name for name, section in self.config.further_policies.items() if section.offload_when_idle}
        resting = max((size for name, size in sizes.items() if name in idle), default=0)
        return peak(self.memory, "device") + resting + sum(size for name, size in sizes.items() if name not in idle)

    @property
    def _place(self) -> Place:
        return "host" if self.device == "cpu" else "device"

    def lines(self) -> list[str]:
        """The lines that a run prints at its start."""
        parts = ", ".join(f"{part.name} {gib(part.bytes)}" for part in self.memory if part.place == self._place)
        most = gib(peak(self.memory, self._place))
        workers = self.config.worker_group.num_workers
        several = f" ({workers} workers)" if workers > 1 else ""
        disk = ", ".join(f"{name} {gib(size)}" for name, size in self.disk.items())
        return [
            f"estimate: {self.parameters:,} parameters; a worker{several} needs about {most} GiB at its peak: {parts}",
            f"estimate: disk in GiB: {disk}; a step {self._step}",
            *(f"estimate: {note}" for note in self.notes),
            *(f"estimate: {name}: {each.lines()[0].partition(': ')[2]}" for name, each in self.further.items()),
        ]

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

    def verdict(self) -> str:
        """One line that says whether a worker fits its GPU; for GPUs that a run is planned for."""
        assert self.planned is not None
        needed, have = self.device_bytes, self.planned.memory_bytes
        fits = "fits" if MARGIN * needed <= have else "may not fit" if needed <= have else "does not fit"
        return (
            f"{fits} on {self.planned}: about {gib(needed)} of {gib(have)} GiB on each GPU, by counting; warnings "
            f"start at {MARGIN} times that"
        )

    def warnings(self) -> list[str]:
        """One line per problem; empty if everything fits."""
        found: list[str] = []
        if self.free_memory is not None and MARGIN * self.host_bytes > self.free_memory:
            found.append(
                f"the run may need {gib(self.host_bytes)} GiB of memory, and {gib(self.free_memory)} GiB are free. "
                f"{self._remedy('host')}"
            )
        needed, free = self.device_bytes, min((gpu.free_bytes for gpu in self.gpus), default=None)
        if free is not None and MARGIN * needed > free:
            found.append(
                f"{'the workers on a GPU' if self.further else 'a worker'} may need {gib(needed)} GiB of "
                f"{'it' if self.further else 'its GPU'}, and {gib(free)} GiB are free. "
                f"{self._remedy('device')}"
            )
        written = sum(self.disk.values())
        if self.free_disk is not None and written > self.free_disk:
            found.append(
                f"the run may write {gib(written)} GiB, and {gib(self.free_disk)} GiB are free at output_dir="
                f"{str(self.config.output_dir)!r}. Free some space, write somewhere else, or keep fewer checkpoints "
                "(checkpoints.keep_last)"
            )
        return [f"warning: {text}" for text in (*found, self.output_dir_problem) if text is not None]

    def _remedy(self, place: Place) -> str:
        """Advice that reduces the largest uses at `place`, the largest first."""
        policy, sizes = self.config.policy, {use.name: use.bytes for use in self.memory if use.place == place}
        moments = sizes.get("moments", 0) + sizes.get("second moments", 0)
        state = sum(sizes.get(name, 0) for name in ("weights", "main weights", "gradients")) + moments
        advice = {
            "set policy.activation_checkpointing=full": (policy.activation_checkpointing != "full")
            * sizes.get("activations", 0),
            "reduce the tokens of a microbatch (policy.batching.tokens)": sizes.get("activations", 0) - 1,
            "reduce generation.batch_size": sizes.get("keys and values", 0) + sizes.get("sampling", 0),
            "generate in workers of their own (generation.workers)": sizes.get("generation model", 0),
            "use more workers": state if place == "device" else 0,
            "set policy.offload.optimizer=true": (not policy.offload.optimizer and place == "device") * moments,
            "train adapters (policy.lora)": (policy.lora is None) * state // 4,
            "reduce worker_group.num_workers": place == "host" and self.config.worker_group.num_workers > 1,
        }
        ranked = sorted((text for text, size in advice.items() if size > 0), key=lambda text: -advice[text])
        listed = ", or ".join(ranked[:4]) or "use a smaller model"
        return listed[0].upper() + listed[1:]

    def table(self) -> Table:
        """All figures as a table, for `--dry-run`."""
        from rich.table import Table

        table = Table("What", "When", title="Estimate", title_justify="left")
        table.add_column("GiB", justify="right")
        for place, where in PLACES.items():
            if most := peak(self.memory, place):
                for part in self.memory:
                    if part.place == place:
                        table.add_row(f"{where} of a worker: {part.name}", ", ".join(part.phases), gib(part.bytes))
                table.add_row(f"{where} of a worker, at its peak", "", gib(most))
        for name, each in self.further.items():
            for place, where in PLACES.items():
                if most := peak(each.memory, place):
                    table.add_row(f"{where} of a worker of {name}, at its peak", "", gib(most))
        workers = sum(each.config.worker_group.num_workers for each in (self, *self.further.values()))
        table.add_row(f"RAM of all {workers} workers", "peak", gib(self.host_bytes))
        if self.planned is None:
            table.add_row("RAM, free", "now", gib(self.free_memory))
        for number, gpu in enumerate(self.gpus):
            when = "now" if self.planned is None else "planned"
            table.add_row(f"GPU {number} ({gpu.name}), free", when, gib(gpu.free_bytes))
        for name, size in self.disk.items():
            table.add_row(f"disk: {name}", "", gib(size))
        if self.planned is None:
            table.add_row("disk, free", "now", gib(self.free_disk))
        table.add_row("tokens generated per step, at most", f"{self.rows.generated:,}", "")
        table.add_row("tokens trained on per step", f"{self.rows.trained:,}", "")
        return table


def estimate(
    parts: Parts, record: PolicyWorkerRecord, *, reference: bool, planned: PlannedGpus | None = None
) -> Estimate:
    """Estimate the run of `parts`, which needs no workers; see `estimate_rows`."""
    further = {name: (model.config, cast("PolicyWorkerRecord", model.record)) for name, model in parts.models.items()}
    return estimate_models(parts.config, record, rows_of(parts), further, reference=reference, planned=planned)


def estimate_models(
    config: RunConfig,
    record: PolicyWorkerRecord,
    rows: Rows,
    further: Mapping[str, tuple[RunConfig, PolicyWorkerRecord]],
    *,
    reference: bool,
    planned: PlannedGpus | None = None,
    notes: tuple[str, ...] = (),
) -> Estimate:
    """Estimate a run with its `further` policies: the configuration of each and its backend. See `estimate_rows`."""
    others = {
        name: estimate_rows(view, backend, rows, reference=False, planned=planned)
        for name, (view, backend) in further.items()
    }
    found = estimate_rows(config, record, rows, reference=reference, planned=planned, notes=notes)
    written = {f"{name}: {what}": size for name, each in others.items() for what, size in each.disk.items()}
    return replace(found, further=others, disk=found.disk | written)


def estimate_rows(
    config: RunConfig,
    record: PolicyWorkerRecord,
    rows: Rows,
    *,
    reference: bool,
    planned: PlannedGpus | None = None,
    notes: tuple[str, ...] = (),
) -> Estimate:
    """Estimate a run of the backend `record` that trains on `rows`.

    `reference`: it keeps a reference policy; `planned`: GPUs to plan for, None: this machine.
    """
    device, model = resolve_device(config.device), model_size(config.policy)
    present = gpus() if device == "cuda" and planned is None else ()
    memory_of_each = planned.memory_bytes if planned else min((gpu.memory_bytes for gpu in present), default=None)
    worker = PlannedWorker(device, model.trained, memory_of_each)
    layout = layout_of(config, record, worker)
    if planned is not None:
        present = [Gpu(planned.name, planned.memory_bytes, planned.memory_bytes)]
    if layout.assumed:
        note = (
            f"the backend {record.name!r} does not say what it keeps on a worker (`state_layout`); assumed: fp32 "
            "weights, gradients and moments sharded over all workers, as FSDP does"
        )
        notes = (*notes, note)
    return Estimate(
        config=config,
        device=device,
        parameters=model.parameters,
        memory=worker_memory(config, layout, model, rows, worker, reference=reference),
        disk=disk(config, model.parameters, model.trained),
        rows=rows,
        free_memory=available_memory() if planned is None else None,
        free_disk=free_disk(config.output_dir) if planned is None else None,
        gpus=present,
        planned=planned,
        notes=notes,
    )


def layout_of(config: RunConfig, record: PolicyWorkerRecord, worker: PlannedWorker) -> StateLayout:
    """The state that the backend of `record` keeps on a worker, as it declares it or as is assumed."""
    return (record.state_layout or assumed_layout)(config, worker)


def print_estimate(parts: Parts, record: PolicyWorkerRecord, *, reference: bool) -> None:
    """Print the estimate on stdout (with `observers.console`), and log its warnings.

    A model whose sizes cannot be determined does not prevent training; a message says so. For invalid data it
    prints nothing, because the algorithm checks all data and reports the error.
    """
    try:
        found = estimate(parts, record, reference=reference)
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
    steps, section, every = config.algorithm.num_steps, config.checkpoints, config.recording.every
    most = section.keep_last + section.keep_best + 1
    kept = min(most, steps // section.every if steps else most) if section.every else 0  # 0 steps: of epochs, not known
    recorded = len({*config.recording.steps, *(range(every, steps + 1, every) if every else ())})
    recorded *= not isinstance(config.policy, FurtherPolicyConfig)
    if not getattr(config.policy, "trained", True):
        return {}
    found = {
        "trained model": 4 * parameters,
        f"{kept} checkpoints": kept * CHECKPOINT_BYTES * trained,
        f"{recorded} recorded steps": recorded * 4 * parameters,
    }
    return {name: size for name, size in found.items() if size}


def gib(size: int | None) -> str:
    """Format bytes in GiB with two or three significant digits; "?" if unknown."""
    if size is None:
        return "?"
    value = size / 2**30
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"

"""The portable form of a checkpoint, which is the same for every backend and layout.

    weights_path/                    a Hugging Face directory: fp32 weights named as by `save_pretrained`, tokenizer
        checksums.json               sizes and checksums of all files
    optimizer_path/
        training.json                optimizer steps by weight, calls of the schedule, versions
        model*.safetensors           AdamW's moments, `exp_avg.NAME` and `exp_avg_sq.NAME`, whole, fp32
        random.safetensors           random states of the workers, `cpu.RANK` and `cuda.RANK`
        checksums.json

All of it is plain numbers, read without unpickling. A directory without checksums, as written by other programs, is
read unchecked. Random states are restored if the number of workers is the same. The sharded form is in `sharded.py`;
`SavedMoments` and `open_saved` read both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlframework.errors import DataError
from rlframework.files import replacing_directory
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.all_ranks import exhausting, run_on_all_ranks
from rlframework.policy.checkpoint.manifest import reading, write_manifest
from rlframework.policy.checkpoint.pretrained import open_saved, write_tensors
from rlframework.policy.model_state import Moments

FORMAT = 1
FIRST, SECOND = "exp_avg.", "exp_avg_sq."
TRAINING, RANDOM = "training.json", "random.safetensors"


@dataclass(frozen=True)
class Progress:
    """Training progress apart from tensors: calls of `train`, and the current number of consecutive skipped steps."""

    train_calls: int
    skipped_in_a_row: int = 0


def save_optimizer(
    path: str,
    moments: Iterator[tuple[str, Moments]],
    progress: Progress,
    context: WorkerContext,
    device: torch.device,
    backend: str,
) -> None:
    """Write the directory `path` atomically from rank 0. Collective.

    `moments` is exhausted on every rank, even on failure.
    """
    states = random_states(context, device)
    steps: dict[str, int] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, state in moments:
            steps[name] = state.steps
            yield FIRST + name, state.exp_avg
            yield SECOND + name, state.exp_avg_sq

    with exhausting(moments):
        if context.rank == 0:
            with replacing_directory(path) as folder:
                write_tensors(folder, tensors())
                write_training(folder, steps, progress, states, backend)
                write_manifest(folder)


def write_training(
    folder: Path, steps: Mapping[str, int], progress: Progress, states: Mapping[str, Tensor], backend: str
) -> None:
    """Write the files common to both forms: `training.json`, and random states by kind and rank."""
    save_file(dict(states), folder / RANDOM)
    facts = {"format": FORMAT, "optimizer": "adamw", "steps": dict(steps), **asdict(progress)}
    facts |= {"backend": backend, "versions": {"torch": torch.__version__}}
    (folder / TRAINING).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def read_progress(folder: str | Path) -> Progress:
    """Read the training progress from `training.json` in an optimizer's directory."""
    return _read_training(folder)[0]


def _read_training(folder: str | Path) -> tuple[Progress, dict[str, int]]:
    """Return the progress, and the optimizer steps by weight."""
    path = Path(folder) / TRAINING
    with reading(path):
        facts = json.loads(path.read_text(encoding="utf-8"))
        version, progress = facts["format"], Progress(int(facts["train_calls"]), int(facts["skipped_in_a_row"]))
        steps = {str(name): int(count) for name, count in facts["steps"].items()}
    if version != FORMAT:
        raise DataError(f"{path} has format {version!r}, but this version reads {FORMAT}")
    return progress, steps


class SavedMoments(Mapping[str, Moments]):
    """The moments in an optimizer's directory, of either form, by weight; each is read on access."""

    def __init__(self, folder: str | Path) -> None:
        self._tensors, self._steps = open_saved(folder), _read_training(folder)[1]
        if {start + name for name in self._steps for start in (FIRST, SECOND)} != set(self._tensors):
            raise DataError(f"{folder} is damaged: {TRAINING} and the moments next to it name different weights")

    def __getitem__(self, name: str) -> Moments:
        return Moments(self._steps[name], self._tensors[FIRST + name], self._tensors[SECOND + name])

    def read_slice(self, name: str, where: tuple[slice, ...]) -> Moments:
        """Read only `where` of the moments of the weight `name`."""
        first, second = (self._tensors.read_slice(start + name, where) for start in (FIRST, SECOND))
        return Moments(self._steps[name], first, second)

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


def moments_slice(moments: Mapping[str, Moments], name: str, where: tuple[slice, ...]) -> Moments:
    """Return `where` of `moments[name]`, reading no more than that from files."""
    if isinstance(moments, SavedMoments):
        return moments.read_slice(name, where)
    whole = moments[name]
    return Moments(whole.steps, whole.exp_avg[where], whole.exp_avg_sq[where])


def random_states(context: WorkerContext, device: torch.device) -> dict[str, Tensor]:
    """Gather the random states of all workers, by kind and rank. Collective."""
    own = {f"cpu.{context.rank}": torch.get_rng_state()}
    if device.type == "cuda":
        own[f"cuda.{context.rank}"] = torch.cuda.get_rng_state(device)
    return {name: state for states in run_on_all_ranks(context, lambda: own) for name, state in states.items()}


def restore_random_states(folder: str | Path, context: WorkerContext, device: torch.device) -> None:
    """Restore this rank's random states, if the number of ranks is that of the save."""
    path = Path(folder) / RANDOM
    with reading(path):
        states = load_file(path)
    if sum(name.startswith("cpu.") for name in states) != context.world_size:
        return
    torch.set_rng_state(states[f"cpu.{context.rank}"])
    if device.type == "cuda" and f"cuda.{context.rank}" in states:
        torch.cuda.set_rng_state(states[f"cuda.{context.rank}"], device)

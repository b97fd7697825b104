"""What training goes on from. The portable form: the same whichever backend or layout wrote it.

    weights_path/                    a Hugging Face directory: fp32 weights named as by `save_pretrained`, tokenizer
        checksums.json               sizes and checksums of all files
    optimizer_path/
        training.json                steps of the optimizer by weight, calls of the schedule, versions
        model*.safetensors           AdamW's moments, `exp_avg.NAME` and `exp_avg_sq.NAME`, whole, fp32
        random.safetensors           random states of the workers, `cpu.RANK` and `cuda.RANK`
        checksums.json

Numbers only, read without unpickling. A directory without checksums, as another program writes it, is read as it is.
Random states go on where the number of workers is the same. The sharded form is in `sharded.py`; what is read here is
of either.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.errors import DataError
from rlframework.files import replacing_directory
from rlframework.policy.all_ranks import together
from rlframework.policy.checkpoint.manifest import write_manifest
from rlframework.policy.checkpoint.pretrained import write_tensors
from rlframework.policy.checkpoint.reader import open_saved
from rlframework.policy.model_state import Moments

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlframework.interfaces.worker_group import WorkerContext
    from rlframework.policy.checkpoint.saved import Saved
    from rlframework.policy.model_state import WeightSpec

FORMAT = 1
FIRST, SECOND = "exp_avg.", "exp_avg_sq."


@dataclass(frozen=True)
class Progress:
    """How far training is, apart from tensors: calls of `train`, and steps skipped in a row just now."""

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
    """Write the directory `path`, all or nothing, from rank 0. Collective; drained on every rank even on failure."""
    states = random_states(context, device)
    try:
        if context.rank == 0:
            _write_optimizer(path, moments, progress, states, backend)
    finally:
        for _ in moments:
            pass


def _write_optimizer(
    path: str, moments: Iterator[tuple[str, Moments]], progress: Progress, states: Mapping[str, Tensor], backend: str
) -> None:
    steps: dict[str, int] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, state in moments:
            steps[name] = state.steps
            yield FIRST + name, state.exp_avg
            yield SECOND + name, state.exp_avg_sq

    with replacing_directory(path) as folder:
        write_tensors(folder, tensors())
        write_training(folder, steps, progress, states, backend)
        write_manifest(folder)


def write_training(
    folder: Path, steps: Mapping[str, int], progress: Progress, states: Mapping[str, Tensor], backend: str
) -> None:
    """Write what is the same in either form: `training.json`, and random states by kind and rank."""
    import torch
    from safetensors.torch import save_file

    save_file(dict(states), folder / "random.safetensors")
    facts = {"format": FORMAT, "optimizer": "adamw", "steps": dict(steps), **asdict(progress)}
    facts |= {"backend": backend, "versions": {"torch": torch.__version__}}
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


class SavedMoments(Mapping[str, Moments]):
    """The moments in an optimizer's directory, of either form, by weight; each is read when it is asked for."""

    def __init__(self, folder: str | Path) -> None:
        self._tensors = open_saved(folder)
        self._steps = _steps(_facts(folder))

    def __enter__(self) -> SavedMoments:
        tensors = self._tensors.__enter__()
        if {start + name for name in self._steps for start in (FIRST, SECOND)} != set(tensors):
            tensors.__exit__(None, None, None)
            raise DataError(f"{tensors.folder} is damaged: training.json and the moments beside it name other weights")
        return self

    def __exit__(self, *exception: object) -> None:
        self._tensors.__exit__(None, None, None)

    def __getitem__(self, name: str) -> Moments:
        return Moments(self._steps[name], self._tensors[FIRST + name], self._tensors[SECOND + name])

    def part(self, name: str, where: tuple[slice, ...]) -> Moments:
        """Of the part `where` of the weight `name`; no more is read."""
        first, second = (self._tensors.part(start + name, where) for start in (FIRST, SECOND))
        return Moments(self._steps[name], first, second)

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


def moments_part(moments: Mapping[str, Moments], name: str, where: tuple[slice, ...]) -> Moments:
    """The part `where` of `moments[name]`; of what lies in files no more is read than that."""
    if isinstance(moments, SavedMoments):
        return moments.part(name, where)
    whole = moments[name]
    return Moments(whole.steps, whole.exp_avg[where], whole.exp_avg_sq[where])


def require_weights(saved: Saved, specs: Mapping[str, WeightSpec]) -> None:
    """A `DataError` that names what differs between the weights that were saved and those of the model."""
    missing, extra = sorted(specs.keys() - saved.keys()), sorted(saved.keys() - specs.keys())
    shapes = {name: (saved.shape(name), specs[name].shape) for name in specs.keys() & saved.keys()}
    other = sorted(name for name, (found, wanted) in shapes.items() if found != wanted)
    parts = [f"lacks {missing[:3]}"] * bool(missing) + [f"has {extra[:3]} besides"] * bool(extra)
    parts += [f"has {name} of shape {shapes[name][0]} instead of {shapes[name][1]}" for name in other[:3]]
    if parts:
        raise DataError(f"the checkpoint {saved.folder} is of another model: it {', '.join(parts)}")


def read_progress(folder: str | Path) -> Progress:
    """What `training.json` of an optimizer's directory says of how far training was."""
    facts = _facts(folder)
    return Progress(int(facts["train_calls"]), int(facts["skipped_in_a_row"]))


def _steps(facts: Mapping[str, Any]) -> dict[str, int]:
    return {str(name): int(count) for name, count in facts["steps"].items()}


def _facts(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / "training.json"
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _steps(facts), int(facts["train_calls"]), int(facts["skipped_in_a_row"])
        found = facts["format"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} cannot be read as the state of a training: {type(error).__name__}: {error}") from error
    if found != FORMAT:
        raise DataError(f"{path} is of format {found!r}, and this version reads {FORMAT}")
    return facts


def random_states(context: WorkerContext, device: torch.device) -> dict[str, Tensor]:
    """The states of all workers' random number generators, by kind and rank. Collective."""
    import torch

    own = {f"cpu.{context.rank}": torch.get_rng_state()}
    if device.type == "cuda":
        own[f"cuda.{context.rank}"] = torch.cuda.get_rng_state(device)
    return {name: state for part in together(context, lambda: own) for name, state in part.items()}


def restore_random_states(folder: str | Path, context: WorkerContext, device: torch.device) -> None:
    """Go on with the random numbers of this rank, where as many ranks were saved as there are now."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder) / "random.safetensors"
    try:
        states = load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is damaged or cannot be read: {error}") from error
    if sum(name.startswith("cpu.") for name in states) != context.world_size:
        return
    torch.set_rng_state(states[f"cpu.{context.rank}"])
    if device.type == "cuda" and f"cuda.{context.rank}" in states:
        torch.cuda.set_rng_state(states[f"cuda.{context.rank}"], device)

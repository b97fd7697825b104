"""The portable form of what training goes on from: the same whichever backend or layout wrote it.

    weights_path/                    a Hugging Face directory: fp32 weights named as by `save_pretrained`, tokenizer
    optimizer_path/
        training.json                steps of the optimizer by weight, calls of the schedule, versions
        model*.safetensors           AdamW's moments, `exp_avg.NAME` and `exp_avg_sq.NAME`, whole, fp32
        random.safetensors           random states of the workers, `cpu.RANK` and `cuda.RANK`

Numbers only, read without unpickling. Random states go on where the number of workers is the same. Left out: formats of
engines (torch DCP), asynchronous saving.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.errors import DataError
from rlframework.files import replacing_directory
from rlframework.policy.weights import write_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlframework.interfaces.worker_group import WorkerContext
    from rlframework.policy.engine import WeightSpec

FORMAT = 1
FIRST, SECOND = "exp_avg.", "exp_avg_sq."


@dataclass(frozen=True)
class Moments:
    """AdamW's state of one weight, whole: how many steps it took, and both moments in fp32."""

    steps: int
    exp_avg: Tensor
    exp_avg_sq: Tensor


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
    states = _random_states(context, device)
    try:
        if context.rank == 0:
            _write_optimizer(path, moments, progress, states, backend)
    finally:
        for _ in moments:
            pass


def _write_optimizer(
    path: str, moments: Iterator[tuple[str, Moments]], progress: Progress, states: Mapping[str, Tensor], backend: str
) -> None:
    import torch
    from safetensors.torch import save_file

    steps: dict[str, int] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, state in moments:
            steps[name] = state.steps
            yield FIRST + name, state.exp_avg
            yield SECOND + name, state.exp_avg_sq

    with replacing_directory(path) as folder:
        write_tensors(folder, tensors())
        save_file(dict(states), folder / "random.safetensors")
        facts = {"format": FORMAT, "optimizer": "adamw", "steps": steps, **asdict(progress)}
        facts |= {"backend": backend, "versions": {"torch": torch.__version__}}
        (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


class SavedTensors(Mapping[str, "Tensor"]):
    """The tensors in the safetensors files of a directory, by name; each is read when it is asked for.

    `DataError` for files that are missing or damaged. Use as a context manager.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> SavedTensors:
        from safetensors import SafetensorError, safe_open

        paths = sorted(self.folder.glob("model*.safetensors"))
        if not paths:
            raise DataError(f"{self.folder} has no model*.safetensors: it is no checkpoint, or not a whole one")
        for path in paths:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise DataError(f"{path} is damaged or cannot be read: {error}") from error
            self._files.update(dict.fromkeys(file.keys(), file))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor `name`, which is not read."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def part(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """The part `where` of the tensor `name`, of which no more is read."""
        if not where or any(one.start == one.stop for one in where):  # safetensors slices neither
            return self[name][where]
        tensor: Tensor = self._files[name].get_slice(name)[where]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class SavedMoments(Mapping[str, Moments]):
    """The moments in the directory that `save_optimizer` wrote, by weight; each is read when it is asked for."""

    def __init__(self, folder: str | Path) -> None:
        self._tensors = SavedTensors(folder)
        self._steps = _steps(_facts(folder))

    def __enter__(self) -> SavedMoments:
        tensors = self._tensors.__enter__()
        if {start + name for name in self._steps for start in (FIRST, SECOND)} != set(tensors):
            tensors.__exit__()
            raise DataError(f"{tensors.folder} is damaged: training.json and the moments beside it name other weights")
        return self

    def __exit__(self, *exception: object) -> None:
        self._tensors.__exit__(*exception)

    def __getitem__(self, name: str) -> Moments:
        return Moments(self._steps[name], self._tensors[FIRST + name], self._tensors[SECOND + name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


def require_weights(saved: SavedTensors, specs: Mapping[str, WeightSpec]) -> None:
    """A `DataError` that names what differs between the weights that were saved and those of the model."""
    missing, extra = sorted(specs.keys() - saved.keys()), sorted(saved.keys() - specs.keys())
    shapes = {name: (tuple(saved[name].shape), specs[name].shape) for name in specs.keys() & saved.keys()}
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


def _random_states(context: WorkerContext, device: torch.device) -> dict[str, Tensor]:
    """The states of all workers' random number generators, by kind and rank. Collective."""
    import torch

    own = {f"cpu.{context.rank}": torch.get_rng_state()}
    if device.type == "cuda":
        own[f"cuda.{context.rank}"] = torch.cuda.get_rng_state(device)
    if context.world_size == 1:
        return own
    found: list[Any] = [None] * context.world_size
    torch.distributed.all_gather_object(found, own)
    return {name: state for part in found for name, state in part.items()}


def restore_random_states(folder: str | Path, context: WorkerContext, device: torch.device) -> None:
    """Go on with the random numbers of this rank, where as many ranks were saved as there are now."""
    import torch
    from safetensors.torch import load_file

    states = load_file(Path(folder) / "random.safetensors")
    if sum(name.startswith("cpu.") for name in states) != context.world_size:
        return
    torch.set_rng_state(states[f"cpu.{context.rank}"])
    if device.type == "cuda" and f"cuda.{context.rank}" in states:
        torch.cuda.set_rng_state(states[f"cuda.{context.rank}"], device)

"""Checkpoints in DeepSpeed's own format: what `engine.save_checkpoint` writes and `engine.load_checkpoint` reads.

    latest                       the name of the folder beside it
    training/*_model_states.pt   the model in the dtype it computes in; under stage 3 what is not dealt out of it
    training/*_optim_states.pt   from stage 1 on, one a rank: its fp32 weights and moments
    zero_to_fp32.py              DeepSpeed's program that makes fp32 weights of them

DeepSpeed goes on from them under the layout that wrote them; what it would find out in the middle is looked at before
anything changes. Weights alone are taken under any stage and number of workers, as `zero_to_fp32` does it.

Left out: adapters, another size of tensor parallelism, and safety: files are pickles, and whoever wrote them can make
the reader run anything.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from rlframework.errors import DataError, NotSupported
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.all_ranks import together
from rlframework_deepspeed.environment import quiet
from rlframework_deepspeed.shards import Shards

TAG = "training"
NAMES = "fp32_group_names"
"""Of the fp32 weights that stage 0 has beside those in half precision, which DeepSpeed does not write."""
MODEL, OPTIMIZER = "_model_states.pt", "_optim_states.pt"
STAGE, TENSOR = "policy.deepspeed.zero_optimization.stage", "policy.parallelism.tensor"
INSTEAD = "take up what was saved as portable or sharded (checkpoints.format), which goes on under any layout"
UNREADABLE = (OSError, RuntimeError, EOFError, pickle.UnpicklingError)
"""What torch and DeepSpeed raise for files that are cut off or no checkpoints."""
Shape = tuple[int, ...]
T = TypeVar("T")


def save(shards: Shards, folder: Path, *, optimizer: bool) -> None:
    """Write what `shards` has into `folder`; without `optimizer` no moments. Collective."""
    if shards.adam is None:
        raise NotSupported("DeepSpeed's format holds fp32 weights with the optimizer's; this worker was built without")
    half_precision = hasattr(shards.wrapper, "fp32_groups")
    state = {NAMES: _names(shards)} if half_precision else {}
    with quiet(), ExitStack() as stack:
        if not optimizer:
            stack.enter_context(patch.object(shards.adam, "state", defaultdict(dict)))
        shards.engine.save_checkpoint(str(folder), tag=TAG, client_state=state)


def _names(shards: Shards) -> list[list[str]]:
    return [[shards.engine.param_names[one] for one in group] for group in shards.wrapper.fp16_groups]


def load(shards: Shards, folder: Path, context: WorkerContext) -> None:
    """Go on from the files in `folder`, by this backend's or a plain program's `save_checkpoint`. Collective.

    Hyperparameters stay those of the configuration. A `DataError`, and nothing has changed, where the files are of
    another model, stage, number of workers or precision, or group the parameters in another way.
    """
    if shards.adam is None:
        raise NotSupported("this worker was built without an optimizer; it takes the weights of a checkpoint alone")
    (tag, *_) = together(context, lambda: _required(shards, folder))
    own = [{key: value for key, value in group.items() if key != "params"} for group in shards.adam.param_groups]
    with quiet():
        shards.engine.load_checkpoint(str(folder), tag=tag, load_lr_scheduler_states=False)
    for group, settings in zip(shards.adam.param_groups, own, strict=True):
        group.update(settings)


# -- what the files are ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Files:
    """What the first files of a checkpoint say of all of it."""

    folder: Path
    tag: str
    model: Mapping[str, Any]
    zero: Mapping[str, Any] | None
    """Of the optimizer, from stage 1 on."""

    @classmethod
    def of(cls, folder: Path, engine: Any) -> _Files:
        """Of the checkpoint in `folder`, of what tensor parallelism leaves on the rank of `engine`.

        A `DataError` where there is none that can be read.
        """
        try:
            tag = (folder / "latest").read_text(encoding="utf-8").strip()
        except OSError as error:
            raise DataError(f"{folder} is no checkpoint of DeepSpeed's: latest cannot be read: {error}") from error
        models, optimizers = (_listed(folder / tag, _part(engine) + end, end) for end in (MODEL, OPTIMIZER))
        if not models:
            raise DataError(f"{folder / tag} is no checkpoint of DeepSpeed's: it has no *{MODEL}")
        model = _opened(models[0], "module", "optimizer", "dp_world_size", "mp_world_size")
        if not optimizers and not model["optimizer"]:
            raise DataError(f"{folder / tag} is not whole: it has no *{OPTIMIZER}")
        zero = _opened(optimizers[0], "optimizer_state_dict") if optimizers else None
        return cls(folder, tag, model, zero and zero["optimizer_state_dict"])

    @property
    def layout(self) -> dict[str, object]:
        """What DeepSpeed cannot change."""
        stage = 0 if self.zero is None else int(self.zero["zero_stage"])
        return _layout(stage, self.model["dp_world_size"], self.model["mp_world_size"], self.model["module"])


def _part(engine: Any) -> str:
    """How names of files call what tensor parallelism leaves on this rank."""
    return f"mp_rank_{int(engine.checkpoint_mp_rank):02d}"


def _listed(folder: Path, *ends: str) -> list[Path]:
    """The files of `folder` that end with the first of `ends` that any ends with."""
    return next((found for end in ends if (found := sorted(folder.glob(f"*{end}")))), [])


def _opened(path: Path, *keys: str) -> Mapping[str, Any]:
    """The mapping in the file `path`, with these keys; its tensors are read when they are used."""
    try:
        found: Mapping[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except UNREADABLE as error:
        raise DataError(f"{path} is damaged or cannot be read: {error}") from error
    missing = set(keys) - found.keys()
    if missing:
        raise DataError(f"{path} is no file of DeepSpeed's: it has no {sorted(missing)}")
    return found


def _layout(stage: int, data: int, tensor: int, module: Mapping[str, Tensor]) -> dict[str, object]:
    """Stages 1 and 2 have the same files."""
    dtype = next(one.dtype for one in module.values() if one.is_floating_point())
    return {
        STAGE: "1 or 2" if stage in (1, 2) else stage,
        "the number of workers that ZeRO deals out to": data,
        TENSOR: tensor,
        "policy.precision": str(dtype).removeprefix("torch."),
    }


def _require_same(shards: Shards, files: _Files, *keys: str) -> None:
    """A `DataError` where the layout of `files` is not that of `shards`; `keys`: what of it, by default all."""
    engine = shards.engine
    stage, tensor = int(engine.zero_optimization_stage()), int(engine.mp_world_size)
    own = _layout(stage, shards.ranks, tensor, dict(engine.module.named_parameters()))
    for key in keys or own:
        if files.layout[key] != own[key]:
            raise DataError(
                f"{files.folder} was written where {key} was {files.layout[key]}; here it is {own[key]}, and DeepSpeed "
                f"cannot go on from it; {INSTEAD}"
            )


def _required(shards: Shards, folder: Path) -> str:
    """The tag of the checkpoint in `folder`; a `DataError` where `shards` cannot go on from it. No collective."""
    files, engine = _Files.of(folder, shards.engine), shards.engine
    _require_same(shards, files)
    needed = [engine._get_ckpt_name(folder, files.tag)]
    needed += [engine._get_zero_ckpt_name(folder, files.tag)] if files.zero is not None else []
    for path in needed:
        _opened(Path(path))
    there, here = _Parameters.of_files(files), _Parameters.of(shards)
    if there != here:
        raise DataError(
            f"{folder} is of another model, or its optimizer has the parameters in other groups: there are groups of "
            f"{there.sizes}, and here of {here.sizes}. Make a model directory of it with zero_to_fp32.py, and start "
            "from its weights"
        )
    return files.tag


@dataclass(frozen=True)
class _Parameters:
    """Of an engine or a checkpoint: names and shapes, as the optimizer has them from stage 1 on, where order counts."""

    shapes: list[tuple[str, Shape]]
    sizes: list[int]
    """How many are in each group of the optimizer."""

    @classmethod
    def of_files(cls, files: _Files) -> _Parameters:
        """Of a checkpoint."""
        if files.zero is not None:
            return cls._of_zero(files.model["param_shapes"])
        optimizer = files.model["optimizer"]
        return cls._of_stage_0(files.model["module"], optimizer.get("optimizer_state_dict", optimizer)["param_groups"])

    @classmethod
    def of(cls, shards: Shards) -> _Parameters:
        """Of what is here."""
        assert shards.adam is not None
        if shards.engine.zero_optimization():
            return cls._of_zero(shards.engine._get_zero_param_shapes())
        return cls._of_stage_0(shards.engine.module.state_dict(), shards.adam.param_groups)

    @classmethod
    def _of_zero(cls, groups: Iterable[Mapping[str, Any]]) -> _Parameters:
        shapes = [(name, tuple(shape)) for group in groups for name, shape in group.items()]
        return cls(shapes, [len(group) for group in groups])

    @classmethod
    def _of_stage_0(cls, module: Mapping[str, Tensor], groups: Iterable[Mapping[str, Any]]) -> _Parameters:
        return cls([(name, tuple(one.shape)) for name, one in module.items()], [len(one["params"]) for one in groups])


# -- weights alone -----------------------------------------------------------------------------------------------------


def weights(
    shards: Shards, folder: Path, context: WorkerContext, wanted: Mapping[str, Shape]
) -> Mapping[str, Callable[[], Tensor]]:
    """What reads each weight in `folder`, of whatever stage and number of workers, by its name in the model.

    `wanted`: shapes of what tensor parallelism leaves on this rank; its size must be that of the files. A `DataError`
    where they are of another model. Collective. Each process may hold the weights once more meanwhile.
    """

    def found() -> Mapping[str, Any]:
        files = _Files.of(folder, shards.engine)
        _require_same(shards, files, TENSOR)
        tensors = _of_stage_0(files) if files.zero is None else _of_zero(folder / files.tag, shards.engine)
        other = sorted(name for name, shape in wanted.items() if name not in tensors or tensors[name].shape != shape)
        if other:
            raise DataError(f"{folder} is of another model: it lacks {other[:3]}, or has them in other shapes")
        return tensors

    tensors: list[Mapping[str, Any]] = []
    together(context, lambda: tensors.append(found()))
    return {name: tensors[0][name].contiguous for name in wanted}


def _of_stage_0(files: _Files) -> dict[str, Tensor]:
    """Those of the model, and in the place of what is in half precision the fp32 ones, where the names are known."""
    tensors, names = dict(files.model["module"]), files.model.get(NAMES)
    for group, mains in zip(names or (), files.model["optimizer"]["fp32_groups"] if names else (), strict=True):
        tensors |= dict(zip(group, mains, strict=True))
    return tensors


def _of_zero(folder: Path, engine: Any) -> Mapping[str, Any]:
    """By DeepSpeed's own program, of the files of this rank's part by tensor parallelism; not gathered yet."""
    program: Any = import_module("deepspeed.utils.zero_to_fp32")
    listed, part = program.get_checkpoint_files, _part(engine)

    def of_this_part(where: str, pattern: str) -> list[str]:
        return [path for path in listed(where, pattern) if part in Path(path).name]

    def silent(*_: object) -> None:
        """It tells what it does line by line."""

    with ExitStack() as stack:
        for name, instead in (("get_checkpoint_files", of_this_part), ("print", silent), ("tqdm", _plainly)):
            stack.enter_context(patch.object(program, name, instead, create=True))
        try:
            found: Mapping[str, Any] = program._get_fp32_state_dict_from_zero_checkpoint(str(folder), False)
        except (*UNREADABLE, ValueError) as error:
            raise DataError(f"{folder} is damaged or not whole: {error}") from error
    return found


def _plainly(items: Iterable[T], **_: object) -> Iterable[T]:
    return items

"""Checkpoints in DeepSpeed's own format: what `engine.save_checkpoint` writes and `engine.load_checkpoint` reads.

    latest                       the name of the folder beside it
    training/*_model_states.pt   the model in its compute dtype; under stage 3 only what is not sharded
    training/*_optim_states.pt   from stage 1 on, one per rank: its fp32 weights and moments
    zero_to_fp32.py              DeepSpeed's program that converts them to fp32 weights

DeepSpeed resumes only under the layout that wrote the files, which is checked before anything changes. Weights alone
can be loaded under any stage and number of workers, with the code of `zero_to_fp32`.

Not supported: adapters and another tensor-parallel size. The files are pickles, of which only tensors, plain values and
DeepSpeed's own records (`RECORDS`) are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlframework.base.errors import DataError, NotSupported
from rlframework.engine import WorkerContext, replacing, run_on_all_ranks, without_code
from rlframework_deepspeed.process_state import quiet
from rlframework_deepspeed.shards import Shards

TAG = "training"
NAMES = "fp32_group_names"
"""Names of stage 0's fp32 weights in half precision, which DeepSpeed does not save."""
MODEL, OPTIMIZER = "_model_states.pt", "_optim_states.pt"
STAGE, TENSOR = "policy.deepspeed.zero_optimization.stage", "policy.parallelism.tensor"
INSTEAD = "resume from a portable or sharded checkpoint (checkpoints.format), which any layout can load"
UNREADABLE = (OSError, RuntimeError, EOFError)
"""Exceptions that torch and DeepSpeed raise for truncated files and files that are not checkpoints."""
RECORDS = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""The classes, besides tensors and plain values, of the objects in DeepSpeed's files."""
STEPS = "steps_of_parameters"
"""Counts of steps by name, if they differ: DeepSpeed has one for all."""
Shape = tuple[int, ...]


def save(shards: Shards, folder: Path, *, optimizer: bool) -> None:
    """Save `shards` to `folder`; without `optimizer`, no moments. Collective."""
    if shards.adam is None:
        raise NotSupported("DeepSpeed's format requires an optimizer; this worker was built without one")
    half_precision = hasattr(shards.wrapper, "fp32_groups")
    state: dict[str, Any] = {NAMES: _names(shards)} if half_precision else {}
    if shards.engine.zero_optimization():
        state[STEPS] = {name: shards.steps(one) for name, one in _trained(shards).items()} if optimizer else None
    without_moments = nullcontext() if optimizer else replacing(shards.adam, state=defaultdict(dict))
    with quiet(), without_moments:
        shards.engine.save_checkpoint(str(folder), tag=TAG, client_state=state)


def _names(shards: Shards) -> list[list[str]]:
    return [[shards.engine.param_names[one] for one in group] for group in shards.wrapper.fp16_groups]


def load(shards: Shards, folder: Path, context: WorkerContext) -> None:
    """Resume from the files in `folder`, written by this backend's or another program's `save_checkpoint`. Collective.

    Hyperparameters stay those of the configuration. Raises `DataError`, without changing anything, if the files have
    another model, stage, number of workers, precision or parameter grouping.
    """
    if shards.adam is None:
        raise NotSupported("this worker was built without an optimizer; load only the weights of the checkpoint")
    (tag, *_) = run_on_all_ranks(context, lambda: _required(shards, folder))
    own = [{key: value for key, value in group.items() if key != "params"} for group in shards.adam.param_groups]
    with quiet(), without_code(folder, RECORDS):
        _, state = shards.engine.load_checkpoint(str(folder), tag=tag, load_lr_scheduler_states=False)
    for group, settings in zip(shards.adam.param_groups, own, strict=True):
        group.update(settings)
    if shards.engine.zero_optimization():
        counts = state.get(STEPS) or {}
        most = max((int(one["step"]) for one in shards.adam.state.values() if "step" in one), default=0)
        shards.set_steps({one: counts.get(name, most) for name, one in _trained(shards).items()})


def _trained(shards: Shards) -> dict[str, Any]:
    named = shards.engine.module.named_parameters()
    return {name: parameter for name, parameter in named if shards.is_trained(parameter)}


# -- what the files are ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Files:
    """The contents of a checkpoint's first files, which describe all of it."""

    folder: Path
    tag: str
    model: Mapping[str, Any]
    zero: Mapping[str, Any] | None
    """Of the optimizer, from stage 1 on."""

    @classmethod
    def of(cls, folder: Path, engine: Any) -> _Files:
        """Open the checkpoint in `folder` for the tensor-parallel rank of `engine`; raise `DataError` if unreadable."""
        try:
            tag = (folder / "latest").read_text(encoding="utf-8").strip()
        except OSError as error:
            raise DataError(f"{folder} is not a DeepSpeed checkpoint: latest cannot be read: {error}") from error
        models, optimizers = (_listed(folder / tag, _part(engine) + end, end) for end in (MODEL, OPTIMIZER))
        if not models:
            raise DataError(f"{folder / tag} is not a DeepSpeed checkpoint: it has no *{MODEL}")
        model = _opened(models[0], "module", "optimizer", "dp_world_size", "mp_world_size")
        if not optimizers and not model["optimizer"]:
            raise DataError(f"{folder / tag} is incomplete: it has no *{OPTIMIZER}")
        zero = _opened(optimizers[0], "optimizer_state_dict") if optimizers else None
        return cls(folder, tag, model, zero and zero["optimizer_state_dict"])

    @property
    def layout(self) -> dict[str, object]:
        """The layout, which DeepSpeed cannot change on loading."""
        stage = 0 if self.zero is None else int(self.zero["zero_stage"])
        return _layout(stage, self.model["dp_world_size"], self.model["mp_world_size"], self.model["module"])


def _part(engine: Any) -> str:
    """The file name part for this tensor-parallel rank."""
    return f"mp_rank_{int(engine.checkpoint_mp_rank):02d}"


def _listed(folder: Path, *ends: str) -> list[Path]:
    """The files of `folder` with the first suffix in `ends` that matches any."""
    return next((found for end in ends if (found := sorted(folder.glob(f"*{end}")))), [])


def _opened(path: Path, *keys: str) -> Mapping[str, Any]:
    """Load the mapping in `path`, which must have `keys`; tensors are memory-mapped."""
    try:
        with without_code(path, RECORDS):
            found: Mapping[str, Any] = torch.load(path, map_location="cpu", mmap=True)
    except UNREADABLE as error:
        raise DataError(f"{path} is damaged or cannot be read: {error}") from error
    missing = set(keys) - found.keys()
    if missing:
        raise DataError(f"{path} is not a DeepSpeed file: it has no {sorted(missing)}")
    return found


def _layout(stage: int, data: int, tensor: int, module: Mapping[str, Tensor]) -> dict[str, object]:
    """Describe a layout by configuration key; stages 1 and 2 have the same files."""
    dtype = next(one.dtype for one in module.values() if one.is_floating_point())
    return {
        STAGE: "1 or 2" if stage in (1, 2) else stage,
        "the number of workers that ZeRO shards over": data,
        TENSOR: tensor,
        "policy.precision": str(dtype).removeprefix("torch."),
    }


def _require_same(shards: Shards, files: _Files, *keys: str) -> None:
    """Raise `DataError` if the layouts of `files` and `shards` differ in `keys` (default: all)."""
    engine = shards.engine
    stage, tensor = int(engine.zero_optimization_stage()), int(engine.mp_world_size)
    own = _layout(stage, shards.ranks, tensor, dict(engine.module.named_parameters()))
    for key in keys or own:
        if files.layout[key] != own[key]:
            raise DataError(
                f"{files.folder} was written where {key} was {files.layout[key]}; here it is {own[key]}, and DeepSpeed "
                f"cannot resume from it; {INSTEAD}"
            )


def _required(shards: Shards, folder: Path) -> str:
    """The tag of the checkpoint in `folder`; raise `DataError` if `shards` cannot resume from it. Not collective."""
    files, engine = _Files.of(folder, shards.engine), shards.engine
    _require_same(shards, files)
    needed = [engine._get_ckpt_name(folder, files.tag)]
    needed += [engine._get_zero_ckpt_name(folder, files.tag)] if files.zero is not None else []
    for path in needed:
        _opened(Path(path))
    there, here = _Parameters.of_files(files), _Parameters.of(shards)
    if there != here:
        raise DataError(
            f"{folder} is of another model, or its optimizer has the parameters in other groups: it has groups of "
            f"{there.sizes}, this policy of {here.sizes}. Convert it to a model directory with zero_to_fp32.py, and "
            "start from its weights"
        )
    return files.tag


@dataclass(frozen=True)
class _Parameters:
    """Parameter names and shapes of an engine or checkpoint; from stage 1 on in the optimizer's order."""

    shapes: list[tuple[str, Shape]]
    sizes: list[int]
    """The number of parameters in each optimizer group."""

    @classmethod
    def of_files(cls, files: _Files) -> _Parameters:
        """The parameters of a checkpoint."""
        if files.zero is not None:
            return cls._of_zero(files.model["param_shapes"])
        optimizer = files.model["optimizer"]
        return cls._of_stage_0(files.model["module"], optimizer.get("optimizer_state_dict", optimizer)["param_groups"])

    @classmethod
    def of(cls, shards: Shards) -> _Parameters:
        """The parameters of this engine."""
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
    """Return a reader for each weight in `folder`, for any stage and number of workers, by its name in the model.

    `wanted`: shapes of this rank's tensor-parallel shards; the tensor-parallel size must match the files. Raises
    `DataError` for another model. Collective. Each process may need memory for a second copy of the weights.
    """

    def found() -> Mapping[str, Any]:
        files = _Files.of(folder, shards.engine)
        _require_same(shards, files, TENSOR)
        tensors = _of_stage_0(files) if files.zero is None else _of_zero(folder / files.tag, shards.engine)
        other = sorted(name for name, shape in wanted.items() if name not in tensors or tensors[name].shape != shape)
        if other:
            raise DataError(f"{folder} is for another model: it lacks {other[:3]}, or has them in other shapes")
        return tensors

    tensors: list[Mapping[str, Any]] = []
    run_on_all_ranks(context, lambda: tensors.append(found()))
    return {name: tensors[0][name].contiguous for name in wanted}


def _of_stage_0(files: _Files) -> dict[str, Tensor]:
    """The model's weights; fp32 weights replace half-precision ones if their names were saved."""
    tensors, names = dict(files.model["module"]), files.model.get(NAMES)
    for group, mains in zip(names or (), files.model["optimizer"]["fp32_groups"] if names else (), strict=True):
        tensors |= dict(zip(group, mains, strict=True))
    return tensors


def _of_zero(folder: Path, engine: Any) -> Mapping[str, Any]:
    """Read this tensor-parallel rank's weights with DeepSpeed's own program; tensors are merged lazily."""
    program: Any = import_module("deepspeed.utils.zero_to_fp32")
    listed, part = program.get_checkpoint_files, _part(engine)

    def of_this_part(where: str, pattern: str) -> list[str]:
        return [path for path in listed(where, pattern) if part in Path(path).name]

    # it prints every step
    silently = redirect_stdout(StringIO())
    with (
        silently,
        without_code(folder, RECORDS),
        replacing(program, get_checkpoint_files=of_this_part, tqdm=lambda items, **_: items),
    ):
        try:
            found: Mapping[str, Any] = program._get_fp32_state_dict_from_zero_checkpoint(str(folder), False)
        except (*UNREADABLE, ValueError) as error:
            raise DataError(f"{folder} is damaged or incomplete: {error}") from error
    return found

"""Checkpoints in megatron-core's distributed format, `torch_dist`, readable by its `dist_checkpointing`.

A folder contains `common.pt`, `metadata.json`, and the shards and index of a torch distributed checkpoint, with
Megatron-LM's names: `model` (`model0`, `model1`, ... for an interleaved pipeline) and `optimizer`. It can be read under
any layout and number of workers. Megatron-core's writer starts processes for each save; this one writes in the worker.
Not supported: loading one kind of optimizer's state into another (distributed or not, bfloat16 or not).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_pieces

from rlframework.base.errors import DataError, NotSupported
from rlframework.engine import INDEX, read_index, without_code
from rlframework_megatron.gradients import single_optimizers
from rlframework_megatron.main_params import MainParam, MainParams
from rlframework_megatron.upstream import (
    CheckpointingException,
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    dist_checkpointing,
    mcore_to_pyt_state_dict,
    replace_state_dict_keys_with_sharded_keys,
)
from rlframework_megatron.weights import LocalModel

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""How the optimizer state is sharded in the files: under the names and shapes of the weights. Pass copies to
megatron-core, which inserts process groups."""
KIND = "rlframework_optimizer"


class _InProcessSaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # megatron-core carries no types
    """Writes the files of megatron-core's strategy without starting processes."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """See `SaveShardedStrategy` of megatron-core. Collective."""
        virtual_stages, _, _ = replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        save_pieces(
            mcore_to_pyt_state_dict(virtual_stages, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(local_model: LocalModel, folder: Path, *, optimizer: bool) -> None:
    """See `Engine.save_native`. Collective."""
    if optimizer:
        _require_one_count(local_model)
    with torch.no_grad():
        dist_checkpointing.save(
            _state(local_model, optimizer=optimizer, is_loading=False),
            str(folder),
            sharded_strategy=_InProcessSaveStrategy("torch_dist", 1),
            content_metadata={**SHARDING, KIND: _kind(local_model) if optimizer else None},
        )


def load(local_model: LocalModel, folder: Path, *, optimizer: bool) -> None:
    """See `Engine.load_native`. Collective."""
    if (folder / INDEX).exists():
        read_index(folder / INDEX)  # megatron-core would read this pickle again, and run what it names
    with torch.no_grad(), without_code(folder):
        try:
            common = dist_checkpointing.load_common_state_dict(str(folder))
            steps = _require_kind(local_model, folder, common) if optimizer else 0
            state = _state(local_model, optimizer=optimizer, is_loading=True)
            loaded = dist_checkpointing.load(state, str(folder))
        except (CheckpointingException, CheckpointException, OSError) as error:
            for rejected, _ in getattr(error, "failures", {}).values():
                if isinstance(rejected, pickle.UnpicklingError):
                    raise rejected from None
            raise DataError(
                f"{folder} is not a megatron-core checkpoint of this model: {type(error).__name__}: {error}"
            ) from error
        for name, chunk in _named(local_model.chunks):
            chunk.load_state_dict(loaded[name])
        if optimizer:
            _load_optimizer(local_model, loaded["optimizer"], steps)
        elif local_model.optimizer is not None:
            local_model.optimizer.reload_model_params()


def _named(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    for number, chunk in enumerate(chunks):
        yield "model" if len(chunks) == 1 else f"model{number}", chunk


def _state(local_model: LocalModel, *, optimizer: bool, is_loading: bool) -> dict[str, Any]:
    """Megatron-core's sharded state dictionary of the local model and optimizer."""
    state = {name: chunk.sharded_state_dict(metadata=dict(SHARDING)) for name, chunk in _named(local_model.chunks)}
    if optimizer:
        assert local_model.optimizer is not None
        for main in _main_params(local_model):
            if main.moment("exp_avg") is None:
                main.set_moments(0, *(torch.zeros_like(main.values.detach()) for _ in range(2)))
        sharded = local_model.optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=dict(SHARDING))
        state["optimizer"] = sharded
    return state


def _main_params(local_model: LocalModel) -> list[MainParam]:
    main_params: MainParams = local_model.main_params()
    found = (main_params.of(parameter) for parameter, _ in local_model.parameters())
    return [main for main in found if main is not None]


def _load_optimizer(local_model: LocalModel, loaded: Any, steps: int) -> None:
    """Load moments and fp32 weights from `loaded`; keep the current learning rate, weight decay and other settings."""
    singles = single_optimizers(local_model.optimizer)
    for number, single in enumerate(singles):
        if not single.is_stub_optimizer:
            _load_single(single, loaded if len(singles) == 1 else loaded[number], steps)
    for main in _main_params(local_model):
        first, second = main.moment("exp_avg"), main.moment("exp_avg_sq")
        assert first is not None
        assert second is not None
        main.set_moments(steps, first.view(main.values.shape), second.view(main.values.shape))


def _load_single(single: Any, loaded: Any, steps: int) -> None:
    """Load one megatron-core optimizer, working around its handling of the step counts of torch's AdamW."""
    inner = single.optimizer
    if hasattr(single, "gbuf_ranges"):  # it would expect the count among the tensors of each weight
        for state in inner.state.values():
            state.pop("step", None)
        single.load_parameter_state_from_fully_reshardable(loaded["param_state"])
        return
    if isinstance(inner, torch.optim.Adam):  # a count of 0 is omitted from the files
        loaded.get("optimizer", loaded)["state"].setdefault("common_step", torch.tensor(float(steps)))
    settings = [{name: value for name, value in group.items() if name != "params"} for group in inner.param_groups]
    single.load_state_dict(loaded)
    for group, own in zip(inner.param_groups, settings, strict=True):
        group.update(own)


def _kind(local_model: LocalModel) -> dict[str, Any]:
    """The optimizer's class, dtype and number of steps."""
    return {
        "class": type(single_optimizers(local_model.optimizer)[0]).__name__,
        "dtype": str(next(local_model.chunks[0].parameters()).dtype),
        "steps": max((main.steps() for main in _main_params(local_model)), default=0),
    }


def _require_kind(local_model: LocalModel, folder: Path, common: dict[str, Any]) -> int:
    """The step count of the optimizer in `folder`; raise `DataError` if it is of another kind."""
    saved = (dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}).get(KIND)
    if saved is None:
        raise DataError(
            f"{folder} was written without the optimizer's state or by another program; load only its weights"
        )
    own = _kind(local_model)
    if (saved["class"], saved["dtype"]) != (own["class"], own["dtype"]):
        raise DataError(
            f"{folder} has the state of megatron-core's {saved['class']} in {saved['dtype']}, but this policy uses "
            f"{own['class']} in {own['dtype']}: set policy.megatron.distributed_optimizer and policy.precision as they "
            "were, or use a portable or sharded checkpoint, which any of them can read"
        )
    return int(saved["steps"])


def _require_one_count(local_model: LocalModel) -> None:
    """Raise `NotSupported` if weights on any rank have different step counts. Collective."""
    own = sorted({main.steps() for main in _main_params(local_model)})
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    if len(counts := {count for one in every for count in one}) > 1:
        raise NotSupported(
            f"megatron-core's format stores one count of optimizer steps, but the weights have {sorted(counts)}: save "
            "with checkpoints.format=portable or sharded"
        )

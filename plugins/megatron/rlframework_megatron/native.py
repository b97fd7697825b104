"""Checkpoints in megatron-core's distributed format, `torch_dist`: `dist_checkpointing` of megatron-core reads them.

In a folder: `common.pt`, `metadata.json`, and pieces with their index as of torch's distributed checkpoints; under
`model`, or `model0` and so on where a pipeline is interleaved, and `optimizer`, as Megatron-LM names them. Read under
any layout and number of workers. Megatron-core's own writer starts processes for each save; here the worker itself
writes. Left out: the state of one kind of optimizer for another (distributed or not, bfloat16 or not).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_pieces

from rlframework.errors import DataError, NotSupported
from rlframework_megatron.main_params import Main, Mains
from rlframework_megatron.upstream import (
    CheckpointingException,
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    dist_checkpointing,
    mcore_to_pyt_state_dict,
    replace_state_dict_keys_with_sharded_keys,
)
from rlframework_megatron.weights import Holding

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""How an optimizer is cut for a file: under the names and shapes of the weights. Megatron-core gets copies, since
it puts process groups in."""
KIND = "rlframework_optimizer"


class _InProcess(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # megatron-core carries no types
    """Writes what megatron-core's strategy writes, without processes of its own."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """See `SaveShardedStrategy` of megatron-core. Collective."""
        pieces, _, _ = replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        save_pieces(
            mcore_to_pyt_state_dict(pieces, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(holding: Holding, folder: Path, *, optimizer: bool) -> None:
    """See `Engine.save_native`. Collective."""
    if optimizer:
        _require_one_count(holding)
    with torch.no_grad():
        dist_checkpointing.save(
            _state(holding, optimizer=optimizer, is_loading=False),
            str(folder),
            sharded_strategy=_InProcess("torch_dist", 1),
            content_metadata={**SHARDING, KIND: _kind(holding) if optimizer else None},
        )


def load(holding: Holding, folder: Path, *, optimizer: bool) -> None:
    """See `Engine.load_native`. Collective."""
    with torch.no_grad():
        try:
            common = dist_checkpointing.load_common_state_dict(str(folder))
            steps = _require_kind(holding, folder, common) if optimizer else 0
            state = _state(holding, optimizer=optimizer, is_loading=True)
            loaded = dist_checkpointing.load(state, str(folder))
        except (CheckpointingException, CheckpointException, OSError) as error:
            raise DataError(
                f"{folder} holds no checkpoint of megatron-core for this model: {type(error).__name__}: {error}"
            ) from error
        for name, chunk in _named(holding.chunks):
            chunk.load_state_dict(loaded[name])
        if optimizer:
            _load_optimizer(holding, loaded["optimizer"], steps)
        elif holding.optimizer is not None:
            holding.optimizer.reload_model_params()


def _named(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    for number, chunk in enumerate(chunks):
        yield "model" if len(chunks) == 1 else f"model{number}", chunk


def _state(holding: Holding, *, optimizer: bool, is_loading: bool) -> dict[str, Any]:
    """What megatron-core calls a sharded state dictionary, of what is here."""
    state = {name: chunk.sharded_state_dict(metadata=dict(SHARDING)) for name, chunk in _named(holding.chunks)}
    if optimizer:
        assert holding.optimizer is not None
        for main in _mains(holding):
            if main.moment("exp_avg") is None:
                main.set_moments(0, *(torch.zeros_like(main.values.detach()) for _ in range(2)))
        told = holding.optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=dict(SHARDING))
        state["optimizer"] = told
    return state


def _mains(holding: Holding) -> list[Main]:
    mains: Mains = holding.mains()
    found = (mains.of(parameter) for parameter, _ in holding.parameters())
    return [main for main in found if main is not None]


def _load_optimizer(holding: Holding, loaded: Any, steps: int) -> None:
    """Moments and fp32 weights of `loaded`; learning rate, weight decay and the like stay those of now."""
    singles = _singles(holding)
    for number, single in enumerate(singles):
        if not single.is_stub_optimizer:
            _load_single(single, loaded if len(singles) == 1 else loaded[number], steps)
    for main in _mains(holding):
        first, second = main.moment("exp_avg"), main.moment("exp_avg_sq")
        assert first is not None
        assert second is not None
        main.set_moments(steps, first.view(main.values.shape), second.view(main.values.shape))


def _load_single(single: Any, loaded: Any, steps: int) -> None:
    """Into one optimizer of megatron-core's, which stumbles over the counts of steps that torch's AdamW has."""
    inner = single.optimizer
    if hasattr(single, "gbuf_ranges"):  # it would look for the count among the tensors of each weight
        for state in inner.state.values():
            state.pop("step", None)
        single.load_parameter_state_from_fully_reshardable(loaded["param_state"])
        return
    if isinstance(inner, torch.optim.Adam):  # a count of 0 was left out
        loaded.get("optimizer", loaded)["state"].setdefault("common_step", torch.tensor(float(steps)))
    settings = [{name: value for name, value in group.items() if name != "params"} for group in inner.param_groups]
    single.load_state_dict(loaded)
    for group, own in zip(inner.param_groups, settings, strict=True):
        group.update(own)


def _singles(holding: Holding) -> list[Any]:
    """Megatron-core's optimizers: of dense weights and, where there are experts, of those."""
    return list(getattr(holding.optimizer, "chained_optimizers", [holding.optimizer]))


def _kind(holding: Holding) -> dict[str, Any]:
    """Of which kind the optimizer is, and how many steps it has made."""
    return {
        "class": type(_singles(holding)[0]).__name__,
        "dtype": str(next(holding.chunks[0].parameters()).dtype),
        "steps": max((main.steps() for main in _mains(holding)), default=0),
    }


def _require_kind(holding: Holding, folder: Path, common: dict[str, Any]) -> int:
    """How many steps the optimizer in `folder` has made; a `DataError` where it is of another kind."""
    told = (dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}).get(KIND)
    if told is None:
        raise DataError(f"{folder} was written without the optimizer's state, or by other programs; load weights alone")
    own = _kind(holding)
    if (told["class"], told["dtype"]) != (own["class"], own["dtype"]):
        raise DataError(
            f"{folder} has the state of megatron-core's {told['class']} in {told['dtype']}, and this policy has "
            f"{own['class']} in {own['dtype']}: set policy.megatron.distributed_optimizer and policy.precision as they "
            "were, or take a checkpoint of the form portable or sharded, which all of them read"
        )
    return int(told["steps"])


def _require_one_count(holding: Holding) -> None:
    """`NotSupported` where weights have seen different numbers of steps, on this rank or another. Collective."""
    own = sorted({main.steps() for main in _mains(holding)})
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    if len(counts := {count for one in every for count in one}) > 1:
        raise NotSupported(
            f"megatron-core's format has one count of optimizer steps, the weights have {sorted(counts)}: save with "
            "checkpoints.format=portable or sharded"
        )

"""Muon: ignored, with another momentum, or applied to shards in place of whole matrices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.policy.engine import Engine
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import around, mutant
from rlframework_conformance.mutants.policy_worker.engine_access import optimizer_of


@mutant("muon_ignored", "AdamW updates the matrices too.")
@around(Engine.build)
def _ignored(call: Any, engine: Any, **how: Any) -> None:
    optimizer = engine.config.optimizer.model_copy(update={"name": "adamw"})
    engine.config = engine.config.model_copy(update={"optimizer": optimizer})
    call(**how)


@mutant("muon_default_momentum", "Muon uses the default momentum and ignores the configured one.")
@around(Engine.clip_and_step)
def _default_momentum(call: Any, engine: Any, *args: Any) -> Any:
    for group, _ in _matrices(engine):
        group["momentum"] = 0.95
    return call(*args)


@mutant("muon_on_shards", "Each rank orthogonalizes its shard of a matrix.", layout=Layout(data=2))
@around(Engine.build)
def _on_shards(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    group = next(_matrices(engine))[0]
    matrices = [(matrix, nn.Parameter(_local(matrix))) for _, matrix in _matrices(engine)]
    settings = {key: group[key] for key in ("lr", "weight_decay", "momentum")}
    muon = torch.optim.Muon([shard for _, shard in matrices], adjust_lr_fn="match_rms_adamw", **settings)

    def step_on_shards(*arguments: Any) -> None:
        for matrix, shard in matrices:
            shard.grad, matrix.grad = _local(matrix.grad), None
        muon.step()

    optimizer_of(engine).register_step_pre_hook(step_on_shards)


@mutant("muon_average_not_loaded", "Muon's average of gradients starts from zero again.")
@around(Engine.load_moments)
def _average_not_loaded(call: Any, engine: Any, moments: Any) -> None:
    call(moments)
    for _, matrix in _matrices(engine):
        optimizer_of(engine).state[matrix]["exp_avg"].zero_()


def _matrices(engine: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the matrices that Muon updates, each with its parameter group."""
    for group in optimizer_of(engine).param_groups:
        yield from ((group, matrix) for matrix in group["params"] if "momentum" in group)


def _local(tensor: Any) -> Tensor:
    shard: Tensor = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return shard

"""Muon: ignored, with another momentum, or applied to shards in place of whole matrices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import in_engine, optimizer_of

UPDATES = "test_updates_by_muon_are_those_of_whole_matrices"


@mutant("muon_ignored", "AdamW updates the matrices too.", UPDATES)
@in_engine
def ignored(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        config: Any

        def build(self, *, init_optimizer: bool) -> None:
            optimizer = self.config.optimizer.model_copy(update={"name": "adamw"})
            self.config = self.config.model_copy(update={"optimizer": optimizer})
            super().build(init_optimizer=init_optimizer)

    return Broken


@mutant("muon_default_momentum", "Muon uses the default momentum and ignores the configured one.", UPDATES)
@in_engine
def default_momentum(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
            for group, _ in _matrices(self):
                group["momentum"] = 0.95
            return super().clip_and_step(max_grad_norm, lr)

    return Broken


@mutant("muon_on_shards", "Each rank orthogonalizes its shard of a matrix.", UPDATES, layout=Layout(data=2))
@in_engine
def on_shards(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            super().build(init_optimizer=init_optimizer)
            group = next(_matrices(self))[0]
            matrices = [(matrix, nn.Parameter(_local(matrix))) for _, matrix in _matrices(self)]
            settings = {key: group[key] for key in ("lr", "weight_decay", "momentum")}
            muon = torch.optim.Muon([shard for _, shard in matrices], adjust_lr_fn="match_rms_adamw", **settings)

            def on_shards(*arguments: Any) -> None:
                for matrix, shard in matrices:
                    shard.grad, matrix.grad = _local(matrix.grad), None
                muon.step()

            optimizer_of(self).register_step_pre_hook(on_shards)

    return Broken


@mutant(
    "muon_average_not_loaded", "Muon's average of gradients starts from zero again.", "test_training_with_muon_goes_on"
)
@in_engine
def average_not_loaded(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def load_moments(self, moments: Any) -> None:
            super().load_moments(moments)
            for _, matrix in _matrices(self):
                optimizer_of(self).state[matrix]["exp_avg"].zero_()

    return Broken


def _matrices(engine: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the matrices that Muon updates, each with its parameter group."""
    for group in optimizer_of(engine).param_groups:
        yield from ((group, matrix) for matrix in group["params"] if "momentum" in group)


def _local(tensor: Any) -> Tensor:
    shard: Tensor = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return shard

"""Contract 3 with Muon: matrices are orthogonalized whole, in every layout, and its state is resumed from."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlframework.base.errors import DataError
from rlframework.plugins.types import Capability
from rlframework_conformance.further_oracles import MuonOracle
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.checkpoints import require_same_continuation, saved, train
from rlframework_conformance.suites.policy_worker.worker_harness import PolicyHarness, loss_function

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
MOMENTUM = 0.8
WHOLE, EACH = 2e-2, 4e-2
"""Tolerances of updates. `torch.optim.Muon` orthogonalizes in bfloat16, which amplifies the rounding of gradients: the
oracle's own updates differ by 5e-3 as a whole, and 1e-2 for a tensor, if only the order of the rows changes.
"""


class MuonOptimizer(Suite):
    """Muon's update of a matrix depends on all of its elements, unlike AdamW's."""

    @holds(3, Capability.MUON)
    def test_updates_by_muon_are_those_of_whole_matrices(self, harness: PolicyHarness) -> None:
        """After five steps, updates must be those of Muon on whole matrices, and of AdamW for embedding and head."""
        for model in ("untied", "tied"):
            policy = harness.policy(model, optimizer={"name": "muon", "momentum": MOMENTUM, **SETTINGS})
            oracle = MuonOracle(harness.model(model), momentum=MOMENTUM, **SETTINGS)
            before = oracle.weights()
            for number in range(5):
                data = harness.batch(seed=number)
                policy.prepare_for_training()
                policy.train(data, loss_function("nll"))
                oracle.step(data, "nll")
            got, right = _change(before, harness.weights(policy)), _change(before, oracle.weights())
            harness.tensors(f"update by muon, {model} head", got, right, WHOLE, EACH)

    @holds(5, Capability.MUON, Capability.PORTABLE_OPTIMIZER_STATE)
    def test_training_with_muon_goes_on(self, harness: PolicyHarness) -> None:
        """Training with Muon must resume bit for bit, and AdamW must not start from its state."""
        settings: dict[str, Any] = {"optimizer": {"name": "muon", "lr": 1e-3}, "apart": True}
        forms = ["portable", "sharded"][: 1 + (Capability.SHARDED_CHECKPOINTS in harness.record.capabilities)]
        first = harness.policy(**settings)
        train(harness, first, range(3))
        checkpoints = {form: saved(harness, first, form=form) for form in forms}
        wanted, right = train(harness, first, range(3, 5)), harness.weights(first)
        for form, paths in checkpoints.items():
            second = harness.resumed(paths, **settings)
            require_same_continuation(harness, second, range(3, 5), wanted, right, f"resuming with muon, {form}")
        other = harness.policy()
        harness.raises(DataError, lambda: other.load_checkpoint(*paths), "the state of another optimizer", "muon")


def _change(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: after[name].double() - before[name].double() for name in before}

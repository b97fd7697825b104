"""Contract 5 for checkpoints in the engine's own format."""

from __future__ import annotations

from pathlib import Path

from rlframework.base.errors import DataError
from rlframework.plugins.types import Capability
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.checkpoints import require_resumption, saved, train
from rlframework_conformance.suites.policy_worker.sharded import SETTINGS, flipped, loading
from rlframework_conformance.suites.policy_worker.worker_harness import PolicyHarness

NATIVE = Capability.NATIVE_CHECKPOINTS


class Native(Suite):
    """Checkpoints that the engine's own programs read; their numbers are those of the other forms."""

    @holds(5, NATIVE)
    def test_training_goes_on_to_the_bit_from_native_files(self, harness: PolicyHarness) -> None:
        """Training must resume bit for bit from native files: weights, moments, optimizer and schedule steps, also
        tied.
        """
        for model in ("untied", "tied"):
            what = f"resuming from native files, {model} head"
            require_resumption(harness, 2, what, model, "native", **SETTINGS)

    @holds(5, NATIVE)
    def test_native_weights_are_those_that_are_saved(self, harness: PolicyHarness) -> None:
        """Native weights loaded without an optimizer must equal those that `save_pretrained` writes."""
        first = harness.policy(**SETTINGS)
        train(harness, first, range(2))
        path = str(harness.folder / "weights-alone")
        first.save_checkpoint(path, None, form="native")
        right = harness.weights(first)
        second = harness.policy(trains=False)
        second.load_checkpoint(path)
        found = harness.weights(second)
        harness.same("from native weights", found, right)

    @holds(5, NATIVE)
    def test_native_files_are_whole_or_refused(self, harness: PolicyHarness) -> None:
        """A flipped bit, a missing file and a missing optimizer must each raise a `DataError` that names it."""
        policy = harness.policy()
        paths = saved(harness, policy, form="native")
        alone = str(harness.folder / "weights-alone")
        policy.save_checkpoint(alone, None, form="native")
        harness.raises(DataError, loading(harness, (alone, paths[1])), "an optimizer that was not saved", "optimizer")
        largest = max((path for path in Path(paths[0], "engine").rglob("*") if path.is_file()), key=_bytes)
        whole = largest.read_bytes()
        largest.write_bytes(flipped(whole))
        harness.raises(DataError, loading(harness, paths), "a flipped bit", largest.name)
        largest.unlink()
        harness.raises(DataError, loading(harness, paths), "a missing file", largest.name)


def _bytes(path: Path) -> int:
    return path.stat().st_size

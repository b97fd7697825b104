"""Contract 5 for checkpoints in the engine's own format."""

from __future__ import annotations

from pathlib import Path

from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.policy_worker.checkpoints import goes_on, saved, train
from rlframework.conformance.suites.policy_worker.sharded import SETTINGS, flipped, loading
from rlframework.conformance.suites.policy_worker.workbench import PolicyBench
from rlframework.errors import DataError
from rlframework.plugins.types import Capability

NATIVE = Capability.NATIVE_CHECKPOINTS


class Native(Suite):
    """What programs of the engine read; its numbers are those of the other forms."""

    @holds(5, NATIVE)
    def test_training_goes_on_to_the_bit_from_native_files(self, bench: PolicyBench) -> None:
        """Weights, moments, steps of the optimizer and of the schedule, with a tied head too."""
        for model in ("untied", "tied"):
            first = bench.policy(model, **SETTINGS)
            train(bench, first, range(2))
            paths = saved(bench, first, form="native")
            wanted = train(bench, first, range(2, 4))
            right = bench.weights(first)
            second = bench.policy(model, **SETTINGS)
            second.load_checkpoint(*paths)
            goes_on(bench, second, range(2, 4), wanted, right, f"going on from native files, {model} head")

    @holds(5, NATIVE)
    def test_native_weights_are_those_that_are_saved(self, bench: PolicyBench) -> None:
        """Loaded without the optimizer into a policy that has none, they are what `save_pretrained` writes."""
        first = bench.policy(**SETTINGS)
        train(bench, first, range(2))
        path = str(bench.folder / "weights-alone")
        first.save_checkpoint(path, None, form="native")
        right = bench.weights(first)
        second = bench.policy(trains=False)
        second.load_checkpoint(path)
        found = bench.weights(second)
        for name, weight in right.items():
            bench.exact(f"{name} from native weights", found[name], weight)

    @holds(5, NATIVE)
    def test_native_files_are_whole_or_refused(self, bench: PolicyBench) -> None:
        """A file with a flipped bit, one that is missing, an optimizer that was not saved: an error that names it."""
        policy = bench.policy()
        paths = saved(bench, policy, form="native")
        alone = str(bench.folder / "weights-alone")
        policy.save_checkpoint(alone, None, form="native")
        bench.refuses(DataError, loading(bench, (alone, paths[1])), "an optimizer that was not saved", "optimizer")
        largest = max((path for path in Path(paths[0], "engine").rglob("*") if path.is_file()), key=_bytes)
        whole = largest.read_bytes()
        largest.write_bytes(flipped(whole))
        bench.refuses(DataError, loading(bench, paths), "a flipped bit", largest.name)
        largest.unlink()
        bench.refuses(DataError, loading(bench, paths), "a missing file", largest.name)


def _bytes(path: Path) -> int:
    return path.stat().st_size

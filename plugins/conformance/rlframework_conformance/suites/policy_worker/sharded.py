"""Contract 5 for checkpoints written in shards or in the engine's own format, and for all forms across layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from rlframework.base.errors import DataError, WriteError
from rlframework.plugins.types import Capability
from rlframework.policy.trained_weights import open_saved
from rlframework_conformance.layouts import Layout, declared_layouts, enough_gpus
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.checkpoints import (
    SCHEDULE,
    STATE,
    require_resumption,
    saved,
    train,
    training_state,
)
from rlframework_conformance.suites.policy_worker.worker_harness import PolicyHarness

SHARDED, NATIVE = Capability.SHARDED_CHECKPOINTS, Capability.NATIVE_CHECKPOINTS
SETTINGS: dict[str, Any] = {"scheduler": SCHEDULE, "optimizer": {"lr": 1e-3}}


class Sharded(Suite):
    """The sharded form: shards of weights and moments with their offsets, holding the numbers of the portable form."""

    @holds(5, STATE, SHARDED)
    def test_training_goes_on_to_the_bit_from_pieces(self, harness: PolicyHarness) -> None:
        """Training must resume bit for bit from a sharded checkpoint that was written while training continued.

        It holds the state at the start of the save.
        """
        require_resumption(harness, 2, "resuming from shards", form="sharded", **SETTINGS)

    @holds(5, STATE, SHARDED)
    def test_both_forms_hold_the_same_numbers(self, harness: PolicyHarness) -> None:
        """The portable and the sharded form must hold identical weights, moments and steps; no element may be written
        twice.
        """
        for model in ("untied", "tied"):
            policy = harness.policy(model, **SETTINGS)
            train(harness, policy, range(2))
            whole, sharded_paths = saved(harness, policy), saved(harness, policy, form="sharded")
            for kind, portable, sharded in zip(("weights", "moments"), whole, sharded_paths, strict=True):
                right, found = read(portable), read(sharded)
                harness.equal(f"names of {kind}, {model} head", sorted(found), sorted(right))
                harness.same(f"from shards, {model} head", found, right)
                size = sum(path.stat().st_size for path in Path(sharded).glob("*.distcp"))
                least = sum(tensor.nbytes for tensor in right.values())
                # torch.save takes about a kilobyte per shard
                most = least + 3000 * len(right) * harness.layout.workers
                harness.require(least <= size <= most, f"bytes of the {kind}", got=size, expected=(least, most))
            harness.equal(
                f"steps, {model} head", training_state(sharded_paths[1])["steps"], training_state(whole[1])["steps"]
            )

    @holds(5, STATE)
    def test_checkpoints_go_on_under_other_layouts(self, harness: PolicyHarness) -> None:
        """Each form must resume under another layout, in both directions."""
        other = other_layout(harness)
        for written_by, read_by in ((harness.layout, other), (other, harness.layout)):
            first = harness.policy(**SETTINGS, layout=written_by)
            train(harness, first, range(2))
            forms = ("portable", "sharded") if SHARDED in harness.record.capabilities else ("portable",)
            paths = {form: saved(harness, first, form=form) for form in forms}
            loss = train(harness, first, range(2, 3))[0]["global_loss"]
            right = harness.weights(first)
            second = harness.policy(**SETTINGS, layout=read_by)
            for form in forms:
                what = f"{form} form, written by {written_by}, read by {read_by}"
                second.load_checkpoint(*paths[form])
                got = train(harness, second, range(2, 3))[0]["global_loss"]
                harness.values(f"loss after resuming, {what}", got, loss)
                harness.tensors(f"weights after resuming, {what}", harness.weights(second), right, 1e-5, 2e-4)

    @holds(5, STATE, SHARDED)
    def test_damaged_pieces_are_refused(self, harness: PolicyHarness) -> None:
        """A truncated file, a flipped bit and a missing file must each raise a `DataError` that names the file."""
        paths = saved(harness, harness.policy(), form="sharded")
        shard = Path(paths[0]) / "__0_0.distcp"
        whole = shard.read_bytes()
        for what, content in (("cut off", whole[: len(whole) // 2]), ("flipped", flipped(whole))):
            shard.write_bytes(content)
            harness.raises(DataError, loading(harness, paths), f"a shard that is {what}", "__0_0.distcp")
        shard.write_bytes(whole)
        index = Path(paths[1]) / ".metadata"
        index.unlink()
        harness.raises(DataError, loading(harness, paths), "a checkpoint without its index", r"\.metadata")

    @holds(5, STATE, SHARDED)
    def test_a_save_that_cannot_be_written_is_reported(self, harness: PolicyHarness) -> None:
        """A save that cannot be written must raise a `WriteError`, from the call that starts or finishes it, and leave
        nothing.
        """
        policy = harness.policy()
        blocked = harness.folder / "blocked"
        blocked.write_text("a file, where a directory is asked for")

        def save() -> None:
            paths = str(blocked / "model"), str(blocked / "optimizer")
            policy.save_checkpoint(*paths, form="sharded", asynchronous=True)
            policy.finish_checkpoint()

        harness.raises(WriteError, save, "a place that cannot be written to", "blocked")


def loading(harness: PolicyHarness, paths: tuple[str, str]) -> Any:
    """Return a call that loads `paths` into a policy of its own."""
    policy = harness.policy()  # a failed call ends workers in other processes
    return lambda: policy.load_checkpoint(*paths)


def other_layout(harness: PolicyHarness) -> Layout:
    """Return the smallest other declared layout that the backend's section and the machine support, or the same."""
    others = [layout for layout in declared_layouts(harness.record) if layout != harness.layout]
    there = (layout for layout in others if enough_gpus(layout, harness.device))
    return next(filter(harness.supports, sorted(there, key=lambda layout: layout.workers)), harness.layout)


def read(folder: str) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint directory of either form by name, without random states."""
    with open_saved(folder) as found:
        return {name: found[name].clone() for name in found}


def flipped(content: bytes) -> bytes:
    """Return `content` with one bit in the middle flipped."""
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


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
        files = [path for path in Path(paths[0], "engine").rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        whole = largest.read_bytes()
        largest.write_bytes(flipped(whole))
        harness.raises(DataError, loading(harness, paths), "a flipped bit", largest.name)
        largest.unlink()
        harness.raises(DataError, loading(harness, paths), "a missing file", largest.name)

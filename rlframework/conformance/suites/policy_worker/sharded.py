"""Contract 5 for checkpoints that each worker writes a part of, and for all forms across layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from rlframework.conformance.layouts import Layout, declared_layouts
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.policy_worker.checkpoints import SCHEDULE, STATE, goes_on, saved, train
from rlframework.conformance.suites.policy_worker.workbench import PolicyBench
from rlframework.errors import DataError, UserError
from rlframework.plugins.types import Capability
from rlframework.policy.checkpoint.reader import open_saved

SHARDED = Capability.SHARDED_CHECKPOINTS
SETTINGS: dict[str, Any] = {"scheduler": SCHEDULE, "optimizer": {"lr": 1e-3}}


class Sharded(Suite):
    """The sharded form: pieces of weights and moments, with their places; it says what the portable form says."""

    @holds(5, STATE, SHARDED)
    def test_training_goes_on_to_the_bit_from_pieces(self, bench: PolicyBench) -> None:
        """Written while training goes on: what is read is the state of when the save began."""
        first = bench.policy(**SETTINGS)
        train(bench, first, range(2))
        paths = saved(bench, first, form="sharded", asynchronous=True)
        wanted = train(bench, first, range(2, 4))
        first.finish_checkpoint()
        right = bench.weights(first)
        second = bench.policy(**SETTINGS)
        second.load_checkpoint(*paths)
        goes_on(bench, second, range(2, 4), wanted, right, "going on from pieces")

    @holds(5, STATE, SHARDED)
    def test_both_forms_hold_the_same_numbers(self, bench: PolicyBench) -> None:
        """Weights, moments and steps, to the bit; and no element is written twice."""
        for model in ("untied", "tied"):
            policy = bench.policy(model, **SETTINGS)
            train(bench, policy, range(2))
            whole, pieces = saved(bench, policy), saved(bench, policy, form="sharded")
            for kind, portable, sharded in zip(("weights", "moments"), whole, pieces, strict=True):
                right, found = read(portable), read(sharded)
                bench.equal(f"names of {kind}, {model} head", sorted(found), sorted(right))
                for name, tensor in right.items():
                    bench.exact(f"{name} from pieces, {model} head", found[name], tensor)
                size = sum(path.stat().st_size for path in Path(sharded).glob("*.distcp"))
                least = sum(tensor.nbytes for tensor in right.values())
                # torch.save takes about a kilobyte a piece
                most = least + 3000 * len(right) * bench.layout.workers
                bench.require(least <= size <= most, f"bytes of the {kind}", got=size, expected=(least, most))
            bench.equal(f"steps, {model} head", facts(pieces[1])["steps"], facts(whole[1])["steps"])

    @holds(5, STATE, SHARDED)
    def test_saving_beside_training_is_saving_before_it(self, bench: PolicyBench) -> None:
        """The same bytes of numbers, whatever the steps in between do to the memory that they came from."""
        policy = bench.policy(**SETTINGS)
        train(bench, policy, range(2))
        before = saved(bench, policy, form="sharded")
        beside = saved(bench, policy, form="sharded", asynchronous=True)
        train(bench, policy, range(2, 4))
        policy.finish_checkpoint()
        for early, late in zip(before, beside, strict=True):
            right, found = read(early), read(late)
            for name, tensor in right.items():
                bench.exact(f"{name}, saved beside training", found[name], tensor)
        bench.equal("training.json", facts(beside[1]), facts(before[1]))

    @holds(5, STATE)
    def test_checkpoints_go_on_under_other_layouts(self, bench: PolicyBench) -> None:
        """Written by the layout under test and read by another one, and the other way round, in each form."""
        other = other_layout(bench)
        for written_by, read_by in ((bench.layout, other), (other, bench.layout)):
            first = bench.policy(**SETTINGS, layout=written_by)
            train(bench, first, range(2))
            forms = ("portable", "sharded") if SHARDED in bench.record.capabilities else ("portable",)
            paths = {form: saved(bench, first, form=form) for form in forms}
            loss = train(bench, first, range(2, 3))[0]["global_loss"]
            right = bench.weights(first)
            second = bench.policy(**SETTINGS, layout=read_by)
            for form in forms:
                what = f"{form} form, written by {written_by}, read by {read_by}"
                second.load_checkpoint(*paths[form])
                got = train(bench, second, range(2, 3))[0]["global_loss"]
                bench.values(f"loss after going on, {what}", got, loss)
                bench.tensors(f"weights after going on, {what}", bench.weights(second), right, 1e-5, 2e-4)

    @holds(5, STATE, SHARDED)
    def test_damaged_pieces_are_refused(self, bench: PolicyBench) -> None:
        """A file that is cut off, one with a flipped bit, one that is missing: an error that names it."""
        paths = saved(bench, bench.policy(), form="sharded")
        pieces = Path(paths[0]) / "__0_0.distcp"
        whole = pieces.read_bytes()
        for what, content in (("cut off", whole[: len(whole) // 2]), ("flipped", flipped(whole))):
            pieces.write_bytes(content)
            bench.refuses(DataError, loading(bench, paths), f"pieces that are {what}", "__0_0.distcp")
        pieces.write_bytes(whole)
        index = Path(paths[1]) / ".metadata"
        index.unlink()
        bench.refuses(DataError, loading(bench, paths), "a checkpoint without its index", r"\.metadata")

    @holds(5, STATE, SHARDED)
    def test_a_save_that_cannot_be_written_is_told(self, bench: PolicyBench) -> None:
        """By the call that begins it or the one that ends it, and nothing of it stays."""
        policy = bench.policy()
        blocked = bench.folder / "blocked"
        blocked.write_text("a file, where a directory is asked for")

        def save() -> None:
            paths = str(blocked / "model"), str(blocked / "optimizer")
            policy.save_checkpoint(*paths, form="sharded", asynchronous=True)
            policy.finish_checkpoint()

        bench.refuses(UserError, save, "a place that cannot be written to", "blocked")


def loading(bench: PolicyBench, paths: tuple[str, str]) -> Any:
    """The call that loads `paths` into a policy of its own."""
    policy = bench.policy()  # a failed call ends workers in other processes
    return lambda: policy.load_checkpoint(*paths)


def other_layout(bench: PolicyBench) -> Layout:
    """Of the declared ones that are not under test the smallest that the backend's section goes with."""
    others = (layout for layout in declared_layouts(bench.record) if layout != bench.layout)
    return next(filter(bench.takes, sorted(others, key=lambda layout: layout.workers)), bench.layout)


def read(folder: str) -> dict[str, Tensor]:
    """The numbers of a directory of either form, by name; random states are none of them."""
    with open_saved(folder) as found:
        return {name: found[name].clone() for name in found}


def facts(folder: str) -> dict[str, Any]:
    """`training.json` of an optimizer's directory."""
    found: dict[str, Any] = json.loads((Path(folder) / "training.json").read_text())
    return found


def flipped(content: bytes) -> bytes:
    """`content` with one bit in the middle the other way round."""
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

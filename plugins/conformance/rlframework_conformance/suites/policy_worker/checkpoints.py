"""Contract 5: saving, ending, loading and resuming gives the numbers of a run that never stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlframework.base.errors import NonFiniteGradients, UserError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.plugins.types import Capability
from rlframework_conformance.oracle import Oracle, expert_by_expert
from rlframework_conformance.policies import InspectedPolicy, read_weights
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.losses import NotFiniteLoss
from rlframework_conformance.suites.policy_worker.worker_harness import PolicyHarness, loss_function

STATE = Capability.PORTABLE_OPTIMIZER_STATE
DRAW = "rlframework_conformance.inspected_worker:draw"
SCHEDULE = {"name": "linear", "warmup_steps": 2, "total_steps": 8, "min_ratio": 0.1}


class Checkpoints(Suite):
    """The portable form: fp32 weights and both moments under the names of `save_pretrained`, and training progress."""

    @holds(5, STATE)
    def test_training_goes_on_to_the_bit(self, harness: PolicyHarness) -> None:
        """Training must resume bit for bit: weights, moments, bias correction and schedule, over three more steps."""
        require_resumption(harness, 3, "resuming", scheduler=SCHEDULE, optimizer={"lr": 1e-3}, apart=True)

    @holds(5, STATE)
    def test_moments_are_the_oracles(self, harness: PolicyHarness) -> None:
        """Moments must be saved whole, under the names of the weights, with their step counts; a tied head is stored
        once.
        """
        for model in ("untied", "tied"):
            policy, oracle = harness.policy(model), harness.oracle(model)
            for seed in range(3):
                data = harness.batch(seed=seed)
                policy.train(data, loss_function("nll"))
                oracle.step(data, "nll")
            require_moments(harness, saved(harness, policy)[1], oracle, 3, f"{model} head")

    @holds(5, STATE)
    def test_a_checkpoint_that_another_program_wrote_goes_on(self, harness: PolicyHarness) -> None:
        """The backend must resume from a portable checkpoint that the test wrote from the oracle."""
        oracle, policy = harness.oracle(lr=1e-3), harness.policy(optimizer={"lr": 1e-3})
        for seed in range(3):
            oracle.step(harness.batch(seed=seed), "nll")
        policy.load_checkpoint(*written_by_hand(harness.folder / "by-hand", oracle, train_calls=3))
        harness.steps(policy, oracle, range(3, 6), "nll", "from another program")
        harness.tensors("weights after resuming", harness.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(5, STATE)
    def test_skipped_steps_in_a_row_go_on(self, harness: PolicyHarness) -> None:
        """The count of consecutive skipped steps must survive a checkpoint."""
        settings: dict[str, Any] = {"non_finite_gradients": {"stop_after": 2}}
        first = harness.policy(**settings)
        first.train(harness.batch(), NotFiniteLoss())
        paths = saved(harness, first)
        second = harness.resumed(paths, **settings)
        harness.raises(
            NonFiniteGradients,
            lambda: second.train(harness.batch(), NotFiniteLoss()),
            "the second gradient in a row that is not finite, after resuming",
        )

    @holds(5, STATE)
    def test_random_numbers_go_on(self, harness: PolicyHarness) -> None:
        """Each worker's random state must be restored, for adapter dropout, noise or an engine's own sampling."""
        first = harness.policy()
        first.inspect(DRAW)
        paths = saved(harness, first)
        wanted = first.inspect(DRAW)
        second = harness.resumed(paths)
        harness.equal("numbers that the workers draw next", second.inspect(DRAW), wanted)

    @holds(5, STATE)
    def test_saving_a_checkpoint_changes_nothing(self, harness: PolicyHarness) -> None:
        """Saving a checkpoint between two steps must not change training."""
        policy, oracle = harness.policy(), harness.oracle()
        for seed in range(3):
            harness.step(policy, oracle, harness.batch(seed=seed), "nll", f"beside checkpoints, step {seed + 1}")
            saved(harness, policy)

    @holds(5, STATE, Capability.REFERENCE_MODEL)
    def test_the_reference_is_not_the_checkpoint(self, harness: PolicyHarness) -> None:
        """The reference must stay the model that the run started with, also after resuming."""
        data, first = harness.batch(), harness.policy(optimizer={"lr": 1e-2})
        train(harness, first, range(2))
        paths, wanted = saved(harness, first), first.get_logprobs(data)["logprobs"]
        second = harness.resumed(paths, reference=True)
        got = second.get_reference_policy_logprobs(data)["reference_logprobs"]
        harness.values("reference log-probabilities after resuming", got, harness.oracle().logprobs(data))
        harness.exact("the policy's own", second.get_logprobs(data)["logprobs"], wanted)

    @holds(5, STATE, Capability.REFERENCE_MODEL)
    def test_a_reference_that_moved_is_saved(self, harness: PolicyHarness) -> None:
        """A reference that `sync_reference` changed must resume bit for bit, and move on from there."""
        settings: dict[str, Any] = {"reference": True, "optimizer": {"lr": 1e-2}}
        data, first = harness.batch(), harness.policy(**settings)
        train(harness, first, range(1))
        first.sync_reference(0.25)
        train(harness, first, range(1, 2))
        folder = str(harness.folder / "reference")
        paths = saved(harness, first, reference_path=folder)
        wanted = _scored_before_and_after_an_update(first, data)
        second = harness.policy(**settings)
        second.load_checkpoint(*paths, folder)
        scored = _scored_before_and_after_an_update(second, data)
        names = ("reference", "reference after another update", "policy")
        for name, right, got in zip(names, wanted, scored, strict=True):
            harness.exact(f"log-probabilities of the {name}, resumed", got, right)

    @holds(5, STATE)
    def test_damaged_checkpoints_are_refused(self, harness: PolicyHarness) -> None:
        """A truncated, incomplete or foreign checkpoint must raise a `UserError` that names the file."""
        weights, optimizer = (Path(path) for path in saved(harness, harness.policy()))
        whole = (optimizer / "model.safetensors").read_bytes()
        (optimizer / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        self._require_rejected(harness, weights, optimizer, "moments that are truncated", "model.safetensors")
        (optimizer / "model.safetensors").write_bytes(whole)
        (optimizer / "training.json").write_text("{")
        self._require_rejected(harness, weights, optimizer, "a training.json that is truncated", "training.json")
        (weights / "model.safetensors").unlink()
        self._require_rejected(harness, weights, None, "a checkpoint without weights", str(weights))
        self._require_rejected(harness, harness.model("tied"), None, "a checkpoint of another model", "lm_head.weight")

    @staticmethod
    def _require_rejected(harness: PolicyHarness, weights: Path, optimizer: Path | None, what: str, match: str) -> None:
        policy = harness.policy()  # a failed call ends workers in other processes
        paths = (str(weights), None if optimizer is None else str(optimizer))
        harness.raises(UserError, lambda: policy.load_checkpoint(*paths), what, match)


def _scored_before_and_after_an_update(policy: InspectedPolicy, data: BatchedDataDict[Any]) -> list[Tensor]:
    """Return the log-probabilities of the reference, before and after an update of it, and of the policy."""
    before = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    policy.sync_reference(0.5)
    after = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    return [before, after, policy.get_logprobs(data)["logprobs"]]


def require_resumption(
    harness: PolicyHarness, steps: int, what: str, model: str = "untied", form: str = "portable", **keys: Any
) -> None:
    """Require that a policy resumes bit for bit from a checkpoint after `steps` steps, for as many steps.

    A sharded checkpoint is written during these steps. `keys`: of `PolicyHarness.policy`.
    """
    first, later = harness.policy(model, **keys), range(steps, 2 * steps)
    train(harness, first, range(steps))
    paths = saved(harness, first, form=form, asynchronous=form == "sharded")
    wanted = train(harness, first, later)
    if form == "sharded":
        first.finish_checkpoint()
    right = harness.weights(first)
    second = harness.resumed(paths, model, **keys)  # in other processes: those of the first are gone
    require_same_continuation(harness, second, later, wanted, right, what)


def require_same_continuation(
    harness: PolicyHarness,
    policy: InspectedPolicy,
    seeds: range,
    wanted: Sequence[Mapping[str, Any]],
    right: Mapping[str, Tensor],
    what: str,
) -> None:
    """Require that the steps of `seeds` give `wanted` and end at the weights `right`, bit for bit."""
    got_in_turn = train(harness, policy, seeds)
    for step, (left, got) in enumerate(zip(wanted, got_in_turn, strict=True), start=seeds.start + 1):
        harness.scalar(f"learning rate of step {step}, {what}", got["lr"], left["lr"], 0.0)
        harness.exact(f"loss of step {step}, {what}", got["global_loss"], left["global_loss"])
    weights = harness.weights(policy)
    harness.same(f"after {what}", weights, right)


def train(harness: PolicyHarness, policy: InspectedPolicy, seeds: range) -> list[dict[str, Any]]:
    """Take one step per seed and return the results."""
    return [policy.train(harness.batch(seed=seed), loss_function("pg")) for seed in seeds]


def saved(harness: PolicyHarness, policy: InspectedPolicy, **how: Any) -> tuple[str, str]:
    """Save a checkpoint of `policy` and return the paths of weights and optimizer.

    `how`: keywords of `save_checkpoint`.
    """
    folder = harness.folder / f"checkpoint-{len(list(harness.folder.iterdir()))}"
    paths = str(folder / "model"), str(folder / "optimizer")
    policy.save_checkpoint(*paths, **how)
    return paths


def training_state(folder: str) -> dict[str, Any]:
    """Return the contents of `training.json` in an optimizer's directory."""
    found: dict[str, Any] = json.loads((Path(folder) / "training.json").read_text())
    return found


def require_moments(harness: PolicyHarness, folder: str, oracle: Oracle, steps: int, what: str) -> None:
    """Require the oracle's moments, and `steps` steps of each weight, in an optimizer's directory."""
    harness.equal(
        f"steps of each weight, {what}", training_state(folder)["steps"], dict.fromkeys(oracle.weights(), steps)
    )
    found = {name: tensor for name, tensor in read_weights(Path(folder)).items() if name.startswith("exp_avg")}
    harness.tensors(f"moments, {what}", found, moments_of(oracle), 1e-5, 1e-4)


def moments_of(oracle: Oracle) -> dict[str, Tensor]:
    """Return the oracle's moments under the names of the portable form."""
    found: dict[str, Tensor] = {}
    for kind in ("exp_avg", "exp_avg_sq"):
        named = oracle.model.named_parameters()
        moments = {name: oracle.optimizer.state[parameter][kind].clone() for name, parameter in named}
        found |= {f"{kind}.{name}": moment for name, moment in expert_by_expert(moments).items()}
    return found


def written_by_hand(folder: Path, oracle: Oracle, train_calls: int) -> tuple[str, str]:
    """Write the oracle's training state in the portable form, following its specification only."""
    (folder / "model").mkdir(parents=True)
    (folder / "optimizer").mkdir()
    save_file(oracle.weights(), folder / "model" / "model.safetensors")
    save_file(moments_of(oracle), folder / "optimizer" / "model.safetensors")
    save_file(
        {"cpu.0": torch.get_rng_state(), "cpu.1": torch.get_rng_state()}, folder / "optimizer" / "random.safetensors"
    )
    written = {"format": 1, "optimizer": "adamw", "steps": dict.fromkeys(oracle.weights(), 3)}
    written |= {"train_calls": train_calls, "skipped_in_a_row": 0}
    (folder / "optimizer" / "training.json").write_text(json.dumps(written))
    return str(folder / "model"), str(folder / "optimizer")

"""Contract 5: save, end, load, go on, and the numbers are those of a run that never stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlframework.conformance.oracle import Oracle, expert_by_expert
from rlframework.conformance.policies import InspectedPolicy, read_weights
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.policy_worker.losses import NotFiniteLoss
from rlframework.conformance.suites.policy_worker.workbench import PolicyBench, loss_function
from rlframework.errors import NonFiniteGradients, UserError
from rlframework.plugins.types import Capability

STATE = Capability.PORTABLE_OPTIMIZER_STATE
DRAW = "rlframework.conformance.suites.policy_worker.inspection:draw"
SCHEDULE = {"name": "linear", "warmup_steps": 2, "total_steps": 8, "min_ratio": 0.1}


class Checkpoints(Suite):
    """The portable form: fp32 weights and both moments by the names of `save_pretrained`, and how far training was."""

    @holds(5, STATE)
    def test_training_goes_on_to_the_bit(self, bench: PolicyBench) -> None:
        """Weights, moments, their bias correction and the schedule: three steps more end at the same weights."""
        settings: dict[str, Any] = {"scheduler": SCHEDULE, "optimizer": {"lr": 1e-3}, "apart": True}
        first = bench.policy(**settings)
        train(bench, first, range(3))
        paths = saved(bench, first)
        wanted, right = train(bench, first, range(3, 6)), bench.weights(first)
        second = bench.policy(**settings)  # in other processes: those of the first are gone
        second.load_checkpoint(*paths)
        goes_on(bench, second, range(3, 6), wanted, right, "going on")

    @holds(5, STATE)
    def test_moments_are_the_oracles(self, bench: PolicyBench) -> None:
        """Under the names of the weights, whole, with the steps that they took; a tied head stands once."""
        for model in ("untied", "tied"):
            policy, oracle = bench.policy(model), bench.oracle(model)
            for seed in range(3):
                data = bench.batch(seed=seed)
                policy.train(data, loss_function("nll"))
                oracle.step(data, "nll")
            _, folder = saved(bench, policy)
            facts = json.loads((Path(folder) / "training.json").read_text())
            right = moments_of(oracle)
            bench.equal(f"steps of each weight, {model} head", facts["steps"], dict.fromkeys(names_of(oracle), 3))
            found = {name: tensor for name, tensor in read_weights(Path(folder)).items() if name.startswith("exp_avg")}
            bench.tensors(f"moments, {model} head", found, right, 1e-5, 1e-4)

    @holds(5, STATE)
    def test_a_checkpoint_that_another_program_wrote_goes_on(self, bench: PolicyBench) -> None:
        """The form is portable: written here from the oracle, by hand, and trained on by the backend."""
        oracle, policy = bench.oracle(lr=1e-3), bench.policy(optimizer={"lr": 1e-3})
        for seed in range(3):
            oracle.step(bench.batch(seed=seed), "nll")
        policy.load_checkpoint(*written_by_hand(bench.folder / "by-hand", oracle, train_calls=3))
        for seed in range(3, 6):
            bench.step(policy, oracle, bench.batch(seed=seed), "nll", f"from another program, step {seed + 1}")
        bench.tensors("weights after going on", bench.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(5, STATE)
    def test_skipped_steps_in_a_row_go_on(self, bench: PolicyBench) -> None:
        """A run that is stopped between bad steps does not start counting again."""
        settings: dict[str, Any] = {"non_finite_gradients": {"stop_after": 2}}
        first = bench.policy(**settings)
        first.train(bench.batch(), NotFiniteLoss())
        paths = saved(bench, first)
        second = bench.policy(**settings)
        second.load_checkpoint(*paths)
        bench.refuses(
            NonFiniteGradients,
            lambda: second.train(bench.batch(), NotFiniteLoss()),
            "the second gradient in a row that is not finite, after going on",
        )

    @holds(5, STATE)
    def test_random_numbers_go_on(self, bench: PolicyBench) -> None:
        """Each worker's generator, for whatever draws from it: dropout of adapters, noise, an engine's own sampling."""
        first = bench.policy()
        first.inspect(DRAW)
        paths = saved(bench, first)
        wanted = first.inspect(DRAW)
        second = bench.policy()
        second.load_checkpoint(*paths)
        bench.equal("numbers that the workers draw next", second.inspect(DRAW), wanted)

    @holds(5, STATE)
    def test_saving_a_checkpoint_changes_nothing(self, bench: PolicyBench) -> None:
        """Between two steps."""
        policy, oracle = bench.policy(), bench.oracle()
        for seed in range(3):
            bench.step(policy, oracle, bench.batch(seed=seed), "nll", f"beside checkpoints, step {seed + 1}")
            saved(bench, policy)

    @holds(5, STATE, Capability.REFERENCE_MODEL)
    def test_the_reference_is_not_the_checkpoint(self, bench: PolicyBench) -> None:
        """It is the model that the run started with, before and after going on."""
        data, first = bench.batch(), bench.policy(optimizer={"lr": 1e-2})
        train(bench, first, range(2))
        paths, wanted = saved(bench, first), first.get_logprobs(data)["logprobs"]
        second = bench.policy(reference=True)
        second.load_checkpoint(*paths)
        got = second.get_reference_policy_logprobs(data)["reference_logprobs"]
        bench.values("reference log-probabilities after going on", got, bench.oracle().logprobs(data))
        bench.exact("the policy's own", second.get_logprobs(data)["logprobs"], wanted)

    @holds(5, STATE)
    def test_damaged_checkpoints_are_refused(self, bench: PolicyBench) -> None:
        """Cut off, incomplete, or of another model: an error that names the file, and never a guess."""
        weights, optimizer = (Path(path) for path in saved(bench, bench.policy()))
        whole = (optimizer / "model.safetensors").read_bytes()
        (optimizer / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        self._refused(bench, weights, optimizer, "moments that are cut off", "model.safetensors")
        (optimizer / "model.safetensors").write_bytes(whole)
        (optimizer / "training.json").write_text("{")
        self._refused(bench, weights, optimizer, "a training.json that is cut off", "training.json")
        (weights / "model.safetensors").unlink()
        self._refused(bench, weights, None, "a checkpoint without weights", str(weights))
        self._refused(bench, bench.model("tied"), None, "a checkpoint of another model", "lm_head.weight")

    @staticmethod
    def _refused(bench: PolicyBench, weights: Path, optimizer: Path | None, what: str, says: str) -> None:
        policy = bench.policy()  # a failed call ends workers in other processes
        paths = (str(weights), None if optimizer is None else str(optimizer))
        bench.refuses(UserError, lambda: policy.load_checkpoint(*paths), what, says)


def goes_on(
    bench: PolicyBench,
    policy: InspectedPolicy,
    seeds: range,
    wanted: Sequence[Mapping[str, Any]],
    right: Mapping[str, Tensor],
    what: str,
) -> None:
    """The steps of `seeds` give what they gave without a stop, `wanted`, and end at the weights `right`: to the bit."""
    got_in_turn = train(bench, policy, seeds)
    for step, (left, got) in enumerate(zip(wanted, got_in_turn, strict=True), start=seeds.start + 1):
        bench.scalar(f"learning rate of step {step}, {what}", got["lr"], left["lr"], 0.0)
        bench.exact(f"loss of step {step}, {what}", got["global_loss"], left["global_loss"])
    weights = bench.weights(policy)
    for name, weight in right.items():
        bench.exact(f"{name} after {what}", weights[name], weight)


def train(bench: PolicyBench, policy: InspectedPolicy, seeds: range) -> list[dict[str, Any]]:
    """A step for each seed; what each gave."""
    return [policy.train(bench.batch(seed=seed), loss_function("pg")) for seed in seeds]


def saved(bench: PolicyBench, policy: InspectedPolicy, **how: Any) -> tuple[str, str]:
    """Where a checkpoint of `policy` lies now: weights, optimizer. `how`: keywords of `save_checkpoint`."""
    folder = bench.folder / f"checkpoint-{len(list(bench.folder.iterdir()))}"
    paths = str(folder / "model"), str(folder / "optimizer")
    policy.save_checkpoint(*paths, **how)
    return paths


def names_of(oracle: Oracle) -> list[str]:
    """The weights that the oracle trains."""
    return list(oracle.weights())


def moments_of(oracle: Oracle) -> dict[str, Tensor]:
    """The oracle's moments, as the portable form names them."""
    found: dict[str, Tensor] = {}
    for kind in ("exp_avg", "exp_avg_sq"):
        named = oracle.model.named_parameters()
        moments = {name: oracle.optimizer.state[parameter][kind].clone() for name, parameter in named}
        found |= {f"{kind}.{name}": moment for name, moment in expert_by_expert(moments).items()}
    return found


def written_by_hand(folder: Path, oracle: Oracle, train_calls: int) -> tuple[str, str]:
    """The portable form of the oracle's training, from the description of the form alone."""
    (folder / "model").mkdir(parents=True)
    (folder / "optimizer").mkdir()
    save_file(oracle.weights(), folder / "model" / "model.safetensors")
    save_file(moments_of(oracle), folder / "optimizer" / "model.safetensors")
    save_file(
        {"cpu.0": torch.get_rng_state(), "cpu.1": torch.get_rng_state()}, folder / "optimizer" / "random.safetensors"
    )
    facts = {"format": 1, "optimizer": "adamw", "steps": dict.fromkeys(names_of(oracle), 3)}
    facts |= {"train_calls": train_calls, "skipped_in_a_row": 0}
    (folder / "optimizer" / "training.json").write_text(json.dumps(facts))
    return str(folder / "model"), str(folder / "optimizer")

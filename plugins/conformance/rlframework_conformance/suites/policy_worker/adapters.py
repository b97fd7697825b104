"""Contracts 3 to 6 for LoRA: adapters are trained and saved, and the base never changes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlframework.plugins.types import Capability
from rlframework.policy.lora_math import initial_a
from rlframework_conformance.contracts import FP32, TENSOR_AFTER_20_STEPS, WEIGHTS_AFTER_20_STEPS
from rlframework_conformance.further_oracles import LoraOracle
from rlframework_conformance.oracle import Oracle
from rlframework_conformance.policies import InspectedPolicy, read_weights
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.checkpoints import saved, train
from rlframework_conformance.suites.policy_worker.saving import SAMPLING, compare_with_generation
from rlframework_conformance.suites.policy_worker.worker_harness import PolicyHarness

LORA = Capability.LORA
HERE = "rlframework_conformance.inspected_worker"
TARGETS = ("q_proj", "o_proj", "up_proj", "down_proj")
"""Square and non-square layers, split both ways by tensor parallelism."""
RANK, ALPHA = 4, 6.0
SCALE = 1.5
"""alpha / rank = 6 / 4, neither 1 nor a power of 2."""
KEYS: dict[str, Any] = {"lora": {"rank": RANK, "alpha": ALPHA, "target_modules": TARGETS, "seed": 3}}
PREFIX = "base_model.model."
"""Prefix that peft puts before the names in its files."""


class Adapters(Suite):
    """The reference is a plain program that computes W + scale * B A; the files have peft's format."""

    @holds(3, LORA)
    def test_twenty_steps_of_adapters_end_at_the_oracles(self, harness: PolicyHarness) -> None:
        """After 20 steps from B = 0, the adapters must be the oracle's, and no base weight may have moved."""
        policy = harness.policy(**KEYS, optimizer={"lr": 1e-3})
        start, base = adapters_of(harness, policy), read_weights(harness.model())
        oracle = LoraOracle(harness.model(), start, SCALE, lr=1e-3)
        for number in range(20):
            harness.step(policy, oracle, harness.batch(seed=number), "pg", f"adapters, step {number + 1} of 20")
        right, got = oracle.weights(), harness.weights(policy)
        harness.tensors("merged weights after 20 steps", got, right, WEIGHTS_AFTER_20_STEPS, TENSOR_AFTER_20_STEPS)
        for name in sorted(base.keys() - oracle.merged().keys()):
            harness.exact(f"{name}, which has no adapter", got[name], base[name])
        harness.tensors("adapters after 20 steps", adapters_of(harness, policy), oracle.trained(), 1e-3, 1e-2)

    @holds(4, LORA, Capability.REFERENCE_MODEL)
    def test_the_base_is_the_reference_without_a_copy(self, harness: PolicyHarness) -> None:
        """The base must serve as the reference, bit for bit as before the first step, without a second copy of its
        weights.
        """
        data, policy = harness.batch(), harness.policy(**KEYS, reference=True, optimizer={"lr": 1e-2})
        for name, matrix in adapters_of(harness, policy).items():
            drawn = initial_a(name, tuple(matrix.shape), 3) if ".lora_A." in name else torch.zeros_like(matrix)
            harness.exact(f"{name} at the start", matrix, drawn)
        base = policy.get_logprobs(data)["logprobs"]
        harness.values("log-probabilities at the start", base, harness.oracle().logprobs(data))
        train(harness, policy, range(2))
        own = policy.get_logprobs(data)["logprobs"]
        reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        harness.exact("reference log-probabilities after two steps", reference, base)
        harness.require(bool((own != base).any()), "two large steps change the policy's log-probabilities")
        harness.equal(
            "bytes of copies of the base", policy.inspect(f"{HERE}:reference_bytes"), [0] * harness.layout.workers
        )
        harness.exact("the policy's own after the reference", policy.get_logprobs(data)["logprobs"], own)
        train(harness, policy, range(1))
        moved = policy.get_logprobs(data)["logprobs"]
        harness.require(bool((moved != own).any()), "adapters are still trained after the reference")
        policy.inspect(f"{HERE}:raise_inside_reference")
        harness.exact("the policy's own after an exception", policy.get_logprobs(data)["logprobs"], moved)

    @holds(5, LORA)
    def test_a_saved_model_is_merged_and_adapters_are_saved_as_they_are(self, harness: PolicyHarness) -> None:
        """`save_pretrained` must write merged weights under the base's names, and `save_adapter` a peft directory.

        Incompatible adapters must be rejected, and the current ones must stay.
        """
        data, given = harness.batch(), random_adapters(harness)
        path, policy = written_by_hand(harness.folder / "by-hand", given), harness.policy(**KEYS)
        policy.load_adapter(str(path))
        folder = harness.folder / "merged"
        policy.save_pretrained(str(folder))
        oracle = LoraOracle(harness.model(), given, SCALE)
        harness.values("log-probabilities of the saved model", Oracle(folder).logprobs(data), oracle.logprobs(data))
        harness.tensors("merged weights", read_weights(folder), oracle.weights(), FP32, FP32)
        for what, wrong in self._incompatible(harness, given).items():
            told = f"{what} must raise a UserError"
            harness.workers_raise(policy, "UserError", told, "load_adapter", path=str(wrong))
        kept = adapters_of(harness, policy)
        harness.equal("names of the saved adapters", sorted(kept), sorted(given))
        harness.same("as it was loaded", kept, given)
        settings = json.loads((newest(harness) / "adapter_config.json").read_text())
        stored = {key: settings.get(key) for key in ("peft_type", "r", "lora_alpha", "bias", "target_modules")}
        right = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": list(TARGETS)}
        harness.equal("settings in adapter_config.json", stored, right)

    @staticmethod
    def _incompatible(harness: PolicyHarness, given: Mapping[str, Tensor]) -> dict[str, Path]:
        """Return directories that `load_adapter` must reject, by description."""
        fewer = {name: matrix for name, matrix in given.items() if "down_proj" not in name}
        narrow = {name: matrix[:, :8] if ".lora_A." in name else matrix for name, matrix in given.items()}
        damaged = written_by_hand(harness.folder / "damaged", given)
        content = (damaged / "adapter_model.safetensors").read_bytes()
        (damaged / "adapter_model.safetensors").write_bytes(content[: len(content) // 2])
        return {
            "adapters of fewer layers": written_by_hand(harness.folder / "fewer", fewer),
            "adapters of another shape": written_by_hand(harness.folder / "narrow", narrow),
            "adapters of another alpha": written_by_hand(harness.folder / "alpha", given, lora_alpha=8.0),
            "truncated adapters": damaged,
            "no adapters at all": harness.model(),
        }

    @holds(5, LORA, Capability.PORTABLE_OPTIMIZER_STATE)
    def test_training_of_adapters_goes_on_to_the_bit(self, harness: PolicyHarness) -> None:
        """Training must resume bit for bit from adapters and moments.

        The checkpoint names the base without copying it.
        """
        first = harness.policy(**KEYS, optimizer={"lr": 1e-3})
        train(harness, first, range(2))
        paths = saved(harness, first)
        files = [path for folder in paths for path in Path(folder).glob("*.safetensors")]
        names = {name for path in files for name in load_file(path)}
        copied = sorted(name for name in read_weights(harness.model()) if any(name in found for found in names))
        harness.equal("weights of the base in the checkpoint", copied, [])
        wanted, right = train(harness, first, range(2, 4)), adapters_of(harness, first)
        second = harness.resumed(paths, **KEYS, optimizer={"lr": 1e-3})
        for step, (left, got) in enumerate(zip(wanted, train(harness, second, range(2, 4)), strict=True), start=3):
            harness.exact(f"loss of step {step}", got["global_loss"], left["global_loss"])
        harness.same("after resuming", adapters_of(harness, second), right)

    @holds(3, LORA)
    def test_all_linear_adapts_every_linear_layer_but_the_head(self, harness: PolicyHarness) -> None:
        """With `target_modules: all-linear`, every matrix but embedding and head must have an adapter."""
        policy = harness.policy(lora=KEYS["lora"] | {"target_modules": "all-linear"})
        weights = read_weights(harness.model())
        matrices = {name.removesuffix(".weight") for name, weight in weights.items() if weight.ndim == 2}
        layers = matrices - {"model.embed_tokens", "lm_head"}
        adapted = {name.rpartition(".lora_")[0] for name in adapters_of(harness, policy)}
        harness.equal("layers with an adapter", sorted(adapted), sorted(layers))

    @holds(6, LORA, Capability.EMBEDDED_GENERATION)
    def test_generation_has_the_adapters(self, harness: PolicyHarness) -> None:
        """Generation must use the current adapters, before and after large steps."""
        policy = harness.policy(**KEYS, generation=SAMPLING, optimizer={"lr": 3e-2})
        compare_with_generation(harness, policy, "at the start of adapters")
        train(harness, policy, range(2))
        compare_with_generation(harness, policy, "after two steps of adapters")


def random_adapters(harness: PolicyHarness) -> dict[str, Tensor]:
    """Return random adapters of the model `untied` that are nowhere 0."""
    generator = torch.Generator().manual_seed(1)
    found: dict[str, Tensor] = {}
    for name, weight in read_weights(harness.model()).items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in TARGETS:
            rows, columns = weight.shape
            found[f"{layer}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) / math.sqrt(columns)
            found[f"{layer}.lora_B.weight"] = 0.1 * torch.randn(rows, RANK, generator=generator)
    return found


def written_by_hand(folder: Path, adapters: Mapping[str, Tensor], **settings: Any) -> Path:
    """Write `adapters` to `folder` in peft's format, following its specification only."""
    folder.mkdir()
    stored = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    stored |= {"target_modules": list(TARGETS), "lora_dropout": 0.0, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(stored))
    tensors = {PREFIX + name: matrix.contiguous() for name, matrix in adapters.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def adapters_of(harness: PolicyHarness, policy: InspectedPolicy) -> dict[str, Tensor]:
    """Return the adapters that `policy` saves, by layer path."""
    folder = harness.folder / f"adapters-{len(list(harness.folder.glob('adapters-*'))):03}"
    policy.save_adapter(str(folder))
    found = load_file(folder / "adapter_model.safetensors")
    return {name.removeprefix(PREFIX): matrix for name, matrix in found.items()}


def newest(harness: PolicyHarness) -> Path:
    """Return the directory of the adapters saved last."""
    return max(harness.folder.glob("adapters-*"))

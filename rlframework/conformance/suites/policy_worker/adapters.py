"""LoRA, against contracts 3 to 6: adapters are what is trained and saved, and the base stays what it was."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlframework.conformance.contracts import FP32, TENSOR_AFTER_20_STEPS, WEIGHTS_AFTER_20_STEPS
from rlframework.conformance.lora_oracle import LoraOracle
from rlframework.conformance.oracle import Oracle
from rlframework.conformance.policies import InspectedPolicy, read_weights
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.policy_worker.checkpoints import saved, train
from rlframework.conformance.suites.policy_worker.saving import SAMPLING, compare_with_generation
from rlframework.conformance.suites.policy_worker.workbench import PROBE, PROBE_EPS, PROBE_LR, PolicyBench
from rlframework.plugins.types import Capability
from rlframework.policy.lora_math import initial_a

LORA = Capability.LORA
HERE = "rlframework.conformance.suites.policy_worker.inspection"
TARGETS = ("q_proj", "o_proj", "up_proj", "down_proj")
"""Square and not, and split both ways by tensor parallelism."""
RANK, ALPHA = 4, 6.0
SCALE = 1.5
"""6 / 4: neither 1 nor a power of 2."""
KEYS: dict[str, Any] = {"lora": {"rank": RANK, "alpha": ALPHA, "target_modules": TARGETS, "seed": 3}}
PREFIX = "base_model.model."
"""What peft puts before the names in its files."""


class Adapters(Suite):
    """The numbers are those of a plain program that computes W + scale * B A; the files are peft's."""

    @holds(3, LORA)
    def test_twenty_steps_of_adapters_end_at_the_oracles(self, bench: PolicyBench) -> None:
        """From a start where B is 0 to the adapters after 20 steps; and no weight of the base has moved."""
        policy = bench.policy(**KEYS, optimizer={"lr": 1e-3})
        start, base = adapters_of(bench, policy), read_weights(bench.model())
        oracle = LoraOracle(bench.model(), start, SCALE, lr=1e-3)
        for number in range(20):
            bench.step(policy, oracle, bench.batch(seed=number), "pg", f"adapters, step {number + 1} of 20")
        right, got = oracle.weights(), bench.weights(policy)
        bench.tensors("merged weights after 20 steps", got, right, WEIGHTS_AFTER_20_STEPS, TENSOR_AFTER_20_STEPS)
        for name in sorted(base.keys() - oracle.merged().keys()):
            bench.exact(f"{name}, which has no adapter", got[name], base[name])
        bench.tensors("adapters after 20 steps", adapters_of(bench, policy), oracle.trained(), 1e-3, 1e-2)

    @holds(3, LORA)
    def test_gradients_of_adapters_are_the_oracles(self, bench: PolicyBench) -> None:
        """Of A and of B, at a point where neither is 0; with the log-probabilities, the loss and the norm there."""
        data, given = bench.batch(), made_adapters(bench)
        oracle = LoraOracle(bench.model(), given, SCALE, max_grad_norm=None)
        gradients = oracle.gradients(data, "pg")
        policy = bench.policy(**KEYS, **PROBE)
        policy.load_adapter(str(written_by_hand(bench.folder / "by-hand", given)))
        right = oracle.logprobs(data)
        bench.values("log-probabilities with adapters", policy.get_logprobs(data)["logprobs"], right)
        bench.step(policy, oracle, data, "pg", "with adapters")
        after = adapters_of(bench, policy)
        updates = {name: (given[name] - after[name]).double() for name in given}
        found = {name: PROBE_EPS * update / (PROBE_LR - update.abs()) for name, update in updates.items()}
        bench.tensors("gradient", found, gradients, FP32, FP32)

    @holds(4, LORA, Capability.REFERENCE_MODEL)
    def test_the_base_is_the_reference_without_a_copy(self, bench: PolicyBench) -> None:
        """To the bit what it was before the first step, when B was 0; nobody holds its weights a second time."""
        data, policy = bench.batch(), bench.policy(**KEYS, reference=True, optimizer={"lr": 1e-2})
        for name, matrix in adapters_of(bench, policy).items():
            drawn = initial_a(name, tuple(matrix.shape), 3) if ".lora_A." in name else torch.zeros_like(matrix)
            bench.exact(f"{name} at the start", matrix, drawn)
        base = policy.get_logprobs(data)["logprobs"]
        bench.values("log-probabilities at the start", base, bench.oracle().logprobs(data))
        train(bench, policy, range(2))
        own = policy.get_logprobs(data)["logprobs"]
        reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        bench.exact("reference log-probabilities after two steps", reference, base)
        bench.require(bool((own != base).any()), "two large steps change the policy's log-probabilities")
        bench.equal(
            "bytes of copies of the base", policy.inspect(f"{HERE}:reference_bytes"), [0] * bench.layout.workers
        )
        bench.exact("the policy's own after the reference", policy.get_logprobs(data)["logprobs"], own)
        train(bench, policy, range(1))
        moved = policy.get_logprobs(data)["logprobs"]
        bench.require(bool((moved != own).any()), "adapters are still trained after the reference")
        policy.inspect(f"{HERE}:raise_inside_reference")
        bench.exact("the policy's own after an exception", policy.get_logprobs(data)["logprobs"], moved)

    @holds(5, LORA)
    def test_a_saved_model_is_merged_and_adapters_are_saved_as_they_are(self, bench: PolicyBench) -> None:
        """transformers reads the one, with the base's names; the other is a directory of peft's, and is read back.

        Adapters that do not fit are refused, and those that are there stay.
        """
        data, given = bench.batch(), made_adapters(bench)
        path, policy = written_by_hand(bench.folder / "by-hand", given), bench.policy(**KEYS)
        policy.load_adapter(str(path))
        folder = bench.folder / "merged"
        policy.save_pretrained(str(folder))
        oracle = LoraOracle(bench.model(), given, SCALE)
        bench.values("log-probabilities of the saved model", Oracle(folder).logprobs(data), oracle.logprobs(data))
        bench.tensors("merged weights", read_weights(folder), oracle.weights(), FP32, FP32)
        for what, (wrong, says) in self._wrong(bench, given).items():
            for told in policy.inspect(f"{HERE}:call", method="load_adapter", arguments={"path": str(wrong)}):
                bench.require("UserError" in told, f"{what} are refused with a UserError that says {says}", got=told)
        kept = adapters_of(bench, policy)
        bench.equal("names of the saved adapters", sorted(kept), sorted(given))
        for name, matrix in given.items():
            bench.exact(f"{name} as it was loaded", kept[name], matrix)
        settings = json.loads((newest(bench) / "adapter_config.json").read_text())
        told = {key: settings.get(key) for key in ("peft_type", "r", "lora_alpha", "bias", "target_modules")}
        right = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": list(TARGETS)}
        bench.equal("what adapter_config.json says", told, right)

    @staticmethod
    def _wrong(bench: PolicyBench, given: Mapping[str, Tensor]) -> dict[str, tuple[Path, str]]:
        """Directories that `load_adapter` must refuse, by what they hold."""
        fewer = {name: matrix for name, matrix in given.items() if "down_proj" not in name}
        narrow = {name: matrix[:, :8] if ".lora_A." in name else matrix for name, matrix in given.items()}
        damaged = written_by_hand(bench.folder / "damaged", given)
        content = (damaged / "adapter_model.safetensors").read_bytes()
        (damaged / "adapter_model.safetensors").write_bytes(content[: len(content) // 2])
        return {
            "adapters of fewer layers": (written_by_hand(bench.folder / "fewer", fewer), "layers"),
            "adapters of another shape": (written_by_hand(bench.folder / "narrow", narrow), "shape"),
            "adapters of another alpha": (written_by_hand(bench.folder / "alpha", given, lora_alpha=8.0), "alpha"),
            "adapters that are cut off": (damaged, "damaged"),
            "no adapters at all": (bench.model(), "adapter_config.json"),
        }

    @holds(5, LORA, Capability.PORTABLE_OPTIMIZER_STATE)
    def test_training_of_adapters_goes_on_to_the_bit(self, bench: PolicyBench) -> None:
        """Adapters and their moments are the checkpoint; the base is named, and not copied."""
        first = bench.policy(**KEYS, optimizer={"lr": 1e-3})
        train(bench, first, range(2))
        paths = saved(bench, first)
        files = [path for folder in paths for path in Path(folder).glob("*.safetensors")]
        names = {name for path in files for name in load_file(path)}
        copied = sorted(name for name in read_weights(bench.model()) if any(name in found for found in names))
        bench.equal("weights of the base in the checkpoint", copied, [])
        wanted, right = train(bench, first, range(2, 4)), adapters_of(bench, first)
        second = bench.policy(**KEYS, optimizer={"lr": 1e-3})
        second.load_checkpoint(*paths)
        for step, (left, got) in enumerate(zip(wanted, train(bench, second, range(2, 4)), strict=True), start=3):
            bench.exact(f"loss of step {step}", got["global_loss"], left["global_loss"])
        for name, matrix in adapters_of(bench, second).items():
            bench.exact(f"{name} after going on", matrix, right[name])

    @holds(6, LORA, Capability.EMBEDDED_GENERATION)
    def test_generation_has_the_adapters(self, bench: PolicyBench) -> None:
        """Those of now: before and after large steps."""
        policy = bench.policy(**KEYS, generation=SAMPLING, optimizer={"lr": 3e-2})
        compare_with_generation(bench, policy, "at the start of adapters")
        train(bench, policy, range(2))
        compare_with_generation(bench, policy, "after two steps of adapters")


def made_adapters(bench: PolicyBench) -> dict[str, Tensor]:
    """Adapters of the model `untied` that are 0 nowhere, drawn here."""
    generator = torch.Generator().manual_seed(1)
    found: dict[str, Tensor] = {}
    for name, weight in read_weights(bench.model()).items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in TARGETS:
            rows, columns = weight.shape
            found[f"{layer}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) / math.sqrt(columns)
            found[f"{layer}.lora_B.weight"] = 0.1 * torch.randn(rows, RANK, generator=generator)
    return found


def written_by_hand(folder: Path, adapters: Mapping[str, Tensor], **settings: Any) -> Path:
    """`folder`, with `adapters` in it as peft writes them, from the description of its files."""
    folder.mkdir()
    told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    told |= {"target_modules": list(TARGETS), "lora_dropout": 0.0, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    tensors = {PREFIX + name: matrix.contiguous() for name, matrix in adapters.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def adapters_of(bench: PolicyBench, policy: InspectedPolicy) -> dict[str, Tensor]:
    """The adapters of `policy` as it saves them, by the paths of the layers."""
    folder = bench.folder / f"adapters-{len(list(bench.folder.glob('adapters-*'))):03}"
    policy.save_adapter(str(folder))
    found = load_file(folder / "adapter_model.safetensors")
    return {name.removeprefix(PREFIX): matrix for name, matrix in found.items()}


def newest(bench: PolicyBench) -> Path:
    """Where the adapters were saved last."""
    return max(bench.folder.glob("adapters-*"))

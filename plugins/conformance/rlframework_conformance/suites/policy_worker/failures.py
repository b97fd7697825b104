"""Contracts 7 and 8: failures are reported with their origin, and nothing is left half done."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from rlframework.base.errors import BatchError, NotSupported, UserError, WorkerError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.plugins.types import Capability
from rlframework_conformance import cases
from rlframework_conformance.policies import run_config
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.losses import FailingLoss
from rlframework_conformance.suites.policy_worker.worker_harness import PolicyHarness, loss_function

REJECTED_BY_CONFIGURATION: Mapping[Capability, Mapping[str, Any]] = {
    Capability.TENSOR_PARALLEL: {"parallelism": {"tensor": 2}},
    Capability.CONTEXT_PARALLEL: {"parallelism": {"context": 2}},
    Capability.PIPELINE_PARALLEL: {"parallelism": {"pipeline": 2}},
    Capability.EXPERT_PARALLEL: {"parallelism": {"expert": 2}},
    Capability.SEQUENCE_PARALLEL: {"parallelism": {"sequence": True}},
    Capability.DYNAMIC_BATCHING: {"batching": {"mode": "dynamic"}},
    Capability.PACKING: {"batching": {"mode": "packed"}},
    Capability.ACTIVATION_CHECKPOINTING: {"activation_checkpointing": True},
    Capability.BFLOAT16: {"precision": "bfloat16"},
    Capability.FLOAT16: {"precision": "float16"},
    Capability.CPU_OFFLOAD: {"offload": {"optimizer": True}},
    Capability.SCORING: {"head": "score"},
    Capability.MUON: {"optimizer": {"name": "muon"}},
    Capability.LORA: {"lora": {"rank": 4}},
    Capability.MULTIMODAL: {"freeze": "vision"},
}
"""Keys of `policy` that require a capability; without it the configuration is rejected before a process starts."""

REJECTED_BY_WORKER: Mapping[Capability, tuple[str, dict[str, Any]]] = {
    Capability.SCORING: ("score", {"data": None}),
    Capability.CPU_OFFLOAD: ("offload_after_refit", {}),
    Capability.PORTABLE_OPTIMIZER_STATE: ("save_checkpoint", {"weights_path": "nowhere"}),
    Capability.SHARDED_CHECKPOINTS: ("save_checkpoint", {"weights_path": "nowhere", "form": "sharded"}),
    Capability.NATIVE_CHECKPOINTS: ("save_checkpoint", {"weights_path": "nowhere", "form": "native"}),
    Capability.COLLECTIVE_REFIT: ("prepare_info_for_collective", {}),
    Capability.IPC_REFIT: ("prepare_weights_for_ipc", {}),
    Capability.REFERENCE_MODEL: ("get_reference_policy_logprobs", {"data": cases.batch()}),
    Capability.EMBEDDED_GENERATION: ("exchange", {"requests": [], "abort_ids": [], "timeout": 0.0}),
}
"""Worker calls that require a capability."""


class Failures(Suite):
    """Errors state what was given, what is allowed and which rank failed; one failing rank fails the call."""

    @holds(7)
    def test_a_failing_worker_fails_the_call(self, harness: PolicyHarness) -> None:
        """An exception on one rank must fail the call before its deadline with that rank's traceback; no rank may hang.

        The other ranks are waiting in a collective that the failing rank never joins.
        """
        policy = harness.policy(deadlines={"start": 120.0, "call": 90.0, "shutdown": 20.0})
        data = harness.batch()
        data["row"] = torch.arange(data.size)
        started = time.monotonic()
        raised = harness.raises(
            (WorkerError, FailingLoss.Failed),
            lambda: policy.train(data, FailingLoss(failing_row=data.size - 1)),
            "a loss that raises on one rank",
        )
        seconds = time.monotonic() - started
        harness.require(seconds < 60.0, "a failure must be reported before the deadline", got=seconds, expected="< 60")
        message = f"{raised}{raised.__cause__ or ''}"
        harness.require("raised on purpose" in message, "the message must be the worker's", got=message[:400])
        if harness.layout.workers > 1:
            harness.require(
                "in __call__" in message, "the message must contain the worker's traceback", got=message[-400:]
            )
            harness.require("rank " in message, "the message must name the rank", got=message[:200])

    @holds(7)
    def test_shutdown_ends_in_peace_and_twice(self, harness: PolicyHarness) -> None:
        """`shutdown` must succeed and be repeatable, and no process may outlive the run."""
        policy = harness.policy()
        policy.train(harness.batch(), loss_function("nll"))
        harness.equal("return value of shutdown", policy.shutdown(), True)
        harness.equal("return value of a second shutdown", policy.shutdown(), True)

    @holds(7)
    def test_one_policy_after_another(self, harness: PolicyHarness) -> None:
        """A policy must leave nothing behind (process groups, ports, global engine state) that breaks the next one."""
        data = harness.batch()
        right = harness.oracle().logprobs(data)
        for number in range(2):
            policy = harness.policy()
            harness.values(f"log-probabilities, policy {number + 1}", policy.get_logprobs(data)["logprobs"], right)
            policy.shutdown()

    @holds(8)
    def test_bad_batches_are_refused_and_nothing_is_done(self, harness: PolicyHarness) -> None:
        """Invalid batches must raise a `BatchError` in the driver before any work, and the policy must stay usable."""
        policy, oracle = harness.policy(), harness.oracle()
        for what, data in bad_batches(harness.batch()).items():
            harness.raises(BatchError, partial(policy.train, data, loss_function("nll")), what)
        data = harness.batch().slice(0, 8 // harness.layout.data)
        del data["sample_mask"]
        what = "a worker must reject rows without sample_mask"
        harness.workers_raise(policy, "BatchError", what, "train", data=data, loss_fn=loss_function("nll"))
        harness.step(policy, oracle, harness.batch(), "nll", "after bad batches")

    @holds(8)
    def test_workers_refuse_rows_that_do_not_divide(self, harness: PolicyHarness) -> None:
        """Each worker must reject rows that do not divide into global batches, instead of dropping the remainder."""
        policy = harness.policy()
        data = harness.batch(8).slice(0, 7)
        arguments = {"data": data, "loss_fn": loss_function("nll"), "gbs": 4 * harness.layout.data}
        what = "a worker must reject 7 rows if its share is 4"
        harness.workers_raise(policy, "BatchError", what, "train", **arguments)

    @holds(8)
    def test_what_is_not_declared_is_refused(self, harness: PolicyHarness) -> None:
        """An undeclared capability must raise `NotSupported`, from the configuration or from the call, and never be
        ignored.
        """
        declared = harness.record.capabilities
        for capability, keys in REJECTED_BY_CONFIGURATION.items():
            if capability not in declared:
                harness.raises(NotSupported, partial(self._configure, harness, **keys), str(capability))
        policy = harness.policy()
        for capability, (method, arguments) in REJECTED_BY_WORKER.items():
            if capability not in declared:
                what = f"{method} must raise NotSupported: {capability} is not declared"
                harness.workers_raise(policy, "NotSupported", what, method, **arguments)
        what = "save_adapter must raise NotSupported without policy.lora"
        harness.workers_raise(policy, "NotSupported", what, "save_adapter", path="nowhere")
        if Capability.REFERENCE_MODEL not in declared:
            harness.raises(NotSupported, lambda: harness.policy(reference=True), "a reference model")

    @holds(8)
    def test_a_model_that_is_not_there_is_an_error(self, harness: PolicyHarness) -> None:
        """A model directory without weights must raise a `UserError`, never be replaced by fresh weights."""
        empty = harness.folder / "empty"
        empty.mkdir()
        for file in harness.model().iterdir():
            if not file.name.endswith(".safetensors"):
                (empty / file.name).write_bytes(file.read_bytes())
        harness.raises(UserError, lambda: harness.policy(empty), "a model directory without weights", "empty")

    @holds(8)
    def test_an_unknown_key_of_its_own_section_is_refused(self, harness: PolicyHarness) -> None:
        """The record must have a config model for the section `policy.<backend>`, and it must reject unknown keys."""
        section = harness.record.config_model
        if section is None:
            harness.require(
                False, "the record has a config model for its section", got=None, expected="a pydantic model"
            )
        else:
            harness.raises(
                ValueError, lambda: section.model_validate({"no_such_key": 1}), "an unknown key", "no_such_key"
            )

    @staticmethod
    def _configure(harness: PolicyHarness, **keys: Any) -> None:
        parallelism = {**harness.layout.parallelism, **keys.pop("parallelism", {})}
        run_config(
            harness.record.name,
            harness.model(),
            harness.layout,
            manager=harness.manager,
            device=harness.device,
            parallelism=parallelism,
            num_workers=2 * harness.layout.workers,
            **keys,
        )


def bad_batches(good: BatchedDataDict[Any]) -> dict[str, BatchedDataDict[Any]]:
    """Return batches with one defect each, by description."""

    def changed(**values: torch.Tensor) -> BatchedDataDict[Any]:
        return BatchedDataDict({**good, **values})

    def without(name: str) -> BatchedDataDict[Any]:
        return BatchedDataDict({key: value for key, value in good.items() if key != name})

    lengths, ids = good["input_lengths"].clone(), good["input_ids"].clone()
    lengths[2], ids[0, 0] = ids.shape[1] + 1, 10_000
    return {
        "no rows": good.slice(0, 0),
        "rows that do not divide into global batches": good.slice(0, 7),
        "no input_lengths": without("input_lengths"),
        "no token_mask": without("token_mask"),
        "no sample_mask": without("sample_mask"),
        "a row longer than the batch is wide": changed(input_lengths=lengths),
        "a token that the model does not have": changed(input_ids=ids),
        "rows of different numbers": changed(sample_mask=torch.ones(5)),
    }

"""Contracts 7 and 8: what fails is told, by whom it is, and nothing is done by halves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.conformance import cases
from rlframework.conformance.policies import run_config
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.policy_worker.losses import FailingLoss
from rlframework.conformance.suites.policy_worker.workbench import PolicyBench, loss_function
from rlframework.errors import BatchError, NotSupported, UserError, WorkerError
from rlframework.plugins.types import Capability

CALL = "rlframework.conformance.suites.policy_worker.inspection:call"

REFUSED_BY_CONFIGURATION: Mapping[Capability, Mapping[str, Any]] = {
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
    Capability.LORA: {"lora": {"rank": 4}},
}
"""Keys of `policy` that ask for a capability: the configuration is refused before a process starts."""

REFUSED_BY_THE_WORKER: Mapping[Capability, tuple[str, dict[str, Any]]] = {
    Capability.SCORING: ("score", {"data": None}),
    Capability.CPU_OFFLOAD: ("offload_after_refit", {}),
    Capability.PORTABLE_OPTIMIZER_STATE: ("save_checkpoint", {"weights_path": "nowhere"}),
    Capability.SHARDED_CHECKPOINTS: ("save_checkpoint", {"weights_path": "nowhere", "form": "sharded"}),
    Capability.NATIVE_CHECKPOINTS: ("save_checkpoint", {"weights_path": "nowhere", "form": "native"}),
    Capability.COLLECTIVE_REFIT: ("prepare_info_for_collective", {}),
    Capability.IPC_REFIT: ("prepare_weights_for_ipc", {}),
    Capability.REFERENCE_MODEL: ("get_reference_policy_logprobs", {"data": cases.batch()}),
    Capability.EMBEDDED_GENERATION: ("generate", {"data": cases.batch()}),
}
"""Calls of a worker that use one."""


class Failures(Suite):
    """An error names what was given, what is allowed and who is to blame; a failing rank takes the call with it."""

    @holds(7)
    def test_a_failing_worker_fails_the_call(self, bench: PolicyBench) -> None:
        """An exception in one rank's loss: the driver gets it with that rank's traceback, soon, and nobody hangs.

        The other ranks wait in a collective for one that never comes.
        """
        policy = bench.policy(deadlines={"start": 120.0, "call": 30.0, "shutdown": 10.0})
        data = bench.batch()
        data["row"] = torch.arange(data.size)
        begun = time.monotonic()
        raised = bench.refuses(
            (WorkerError, FailingLoss.Failed),
            lambda: policy.train(data, FailingLoss(failing_row=data.size - 1)),
            "a loss that raises on one rank",
        )
        seconds = time.monotonic() - begun
        bench.require(seconds < 20.0, "the failure is told within seconds", got=seconds, expected="< 20")
        told = f"{raised}{raised.__cause__ or ''}"
        bench.require("raised on purpose" in told, "the message is that of the worker", got=told[:400])
        if bench.layout.workers > 1:
            bench.require("in __call__" in told, "the worker's own traceback is told", got=told[-400:])
            bench.require("rank " in told, "the rank is told", got=told[:200])

    @holds(7)
    def test_shutdown_ends_in_peace_and_twice(self, bench: PolicyBench) -> None:
        """No process outlives the run, and a second call is no error."""
        policy = bench.policy()
        policy.train(bench.batch(), loss_function("nll"))
        bench.equal("shutdown ends in peace", policy.shutdown(), True)
        bench.equal("shutdown again", policy.shutdown(), True)

    @holds(7)
    def test_one_policy_after_another(self, bench: PolicyBench) -> None:
        """What one leaves behind (process groups, ports, global state of an engine) does not stop the next."""
        data = bench.batch()
        right = bench.oracle().logprobs(data)
        for number in range(2):
            policy = bench.policy()
            bench.values(f"log-probabilities, policy {number + 1}", policy.get_logprobs(data)["logprobs"], right)
            policy.shutdown()

    @holds(8)
    def test_bad_batches_are_refused_and_nothing_is_done(self, bench: PolicyBench) -> None:
        """By the driver, before any work; the policy is as usable as before."""
        policy, oracle = bench.policy(), bench.oracle()
        for what, data in bad_batches(bench.batch()).items():
            bench.refuses(BatchError, partial(policy.train, data, loss_function("nll")), what)
        data = bench.batch().slice(0, 8 // bench.layout.data)
        del data["sample_mask"]
        for told in policy.inspect(CALL, method="train", arguments={"data": data, "loss_fn": loss_function("nll")}):
            bench.require("BatchError" in told, "a worker refuses rows without sample_mask itself", got=told)
        bench.step(policy, oracle, bench.batch(), "nll", "after bad batches")

    @holds(8)
    def test_workers_refuse_rows_that_do_not_divide(self, bench: PolicyBench) -> None:
        """A rest of a global batch is an error, not rows that are dropped in silence; each worker looks itself."""
        policy = bench.policy()
        data = bench.batch(8).slice(0, 7)
        arguments = {"data": data, "loss_fn": loss_function("nll"), "gbs": 4 * bench.layout.data}
        for told in policy.inspect(CALL, method="train", arguments=arguments):
            bench.require("BatchError" in told, "a worker refuses 7 rows where its share is 4", got=told)

    @holds(8)
    def test_what_is_not_declared_is_refused(self, bench: PolicyBench) -> None:
        """`NotSupported`, by the configuration before a process starts, or by the call. Never ignored."""
        declared = bench.record.capabilities
        for capability, keys in REFUSED_BY_CONFIGURATION.items():
            if capability not in declared:
                bench.refuses(NotSupported, partial(self._configure, bench, **keys), str(capability))
        policy = bench.policy()
        for capability, (method, arguments) in REFUSED_BY_THE_WORKER.items():
            if capability not in declared:
                for told in policy.inspect(CALL, method=method, arguments=arguments):
                    bench.require(
                        "NotSupported" in told, f"{method} is refused: {capability} is not declared", got=told
                    )
        for told in policy.inspect(CALL, method="save_adapter", arguments={"path": "nowhere"}):
            bench.require("NotSupported" in told, "save_adapter is refused where policy.lora is not set", got=told)
        if Capability.REFERENCE_MODEL not in declared:
            bench.refuses(NotSupported, lambda: bench.policy(reference=True), "a reference model")

    @holds(8)
    def test_a_model_that_is_not_there_is_an_error(self, bench: PolicyBench) -> None:
        """Never a model with fresh weights in its place."""
        empty = bench.folder / "empty"
        empty.mkdir()
        for file in bench.model().iterdir():
            if not file.name.endswith(".safetensors"):
                (empty / file.name).write_bytes(file.read_bytes())
        bench.refuses(UserError, lambda: bench.policy(empty), "a model directory without weights", "empty")

    @holds(8)
    def test_an_unknown_key_of_its_own_section_is_refused(self, bench: PolicyBench) -> None:
        """`policy.<backend>` is checked like everything else, by the model on the record."""
        section = bench.record.config_model
        if section is None:
            bench.require(False, "the record names a model of its section", got=None, expected="a pydantic model")
        else:
            bench.refuses(
                ValueError, lambda: section.model_validate({"no_such_key": 1}), "an unknown key", "no_such_key"
            )

    @staticmethod
    def _configure(bench: PolicyBench, **keys: Any) -> None:
        parallelism = {**bench.layout.parallelism, **keys.pop("parallelism", {})}
        run_config(
            bench.record.name,
            bench.model(),
            bench.layout,
            manager=bench.manager,
            device=bench.device,
            parallelism=parallelism,
            num_workers=2 * bench.layout.workers,
            **keys,
        )


def bad_batches(good: BatchedDataDict[Any]) -> dict[str, BatchedDataDict[Any]]:
    """Batches that each have one thing wrong with them, by what it is."""

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

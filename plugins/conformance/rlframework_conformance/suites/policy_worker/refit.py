"""Contract 6 for engines in other processes: they hold the trainer's weights by name, bit for bit.

The engine is the core's own, in a process that has seen no weights. The trainer's weights are read from what it saves
and cast to the transfer dtype by the test.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from rlframework.base.errors import ConfigError, RLFrameworkError
from rlframework.plugins.types import Capability
from rlframework_conformance.policies import InspectedEngines, InspectedPolicy
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.worker_harness import PolicyHarness, loss_function

BROADCAST = "rlframework_conformance.inspected_worker:attempt_to_broadcast"
HELD = "rlframework_conformance.inspected_worker:held_weights"
SMALL = 4096 / 2**20
"""Buffer size in MiB: some groups hold a few weights, and some weights exceed a group."""

SOON = 8.0
"""Deadline in seconds for tests in which a process is late."""


class Refit(Suite):
    """Both transports, and their behavior without a receiver."""

    @holds(6, Capability.IPC_REFIT)
    def test_ipc_brings_the_trainers_weights_to_an_engine_in_another_process(self, harness: PolicyHarness) -> None:
        """IPC must deliver the trainer's weights in fp32, also after a step, when the second refit writes in place."""
        self._delivers(harness, "ipc", torch.float32)

    @holds(6, Capability.COLLECTIVE_REFIT)
    def test_a_process_group_brings_the_trainers_weights_to_an_engine_in_another_process(
        self, harness: PolicyHarness
    ) -> None:
        """A process group must deliver the trainer's weights in bfloat16, each rounded once."""
        self._delivers(harness, "collective", torch.bfloat16)

    @staticmethod
    def _delivers(harness: PolicyHarness, transport: str, dtype: torch.dtype) -> None:
        refit = {
            "transport": transport,
            "buffer_mb": SMALL,
            "dtype": str(dtype).removeprefix("torch."),
            "deadline": 30.0,
        }
        policy = harness.policy(generation={"workers": {}, "refit": refit}, optimizer={"lr": 3e-2})
        engines = harness.engines(policy)
        if transport == "collective" and shares_a_gpu(harness, engines):
            return
        for number in range(2):
            compare(harness, policy, engines, dtype, f"by {transport} after {number} steps")
            policy.train(harness.batch(seed=number), loss_function("nll"))
        compare(harness, policy, engines, dtype, f"by {transport} after 2 steps")

    @holds(6, Capability.IPC_REFIT)
    def test_a_refit_leaves_the_trainer_as_it_was(self, harness: PolicyHarness) -> None:
        """Refits in bfloat16, offload included, must change neither the trainer's weights nor its scores and steps."""
        refit = {"transport": "ipc", "dtype": "bfloat16", "deadline": 30.0}
        policy = harness.policy(generation={"workers": {}, "refit": refit})
        engines, oracle = harness.engines(policy), harness.oracle()
        for number in range(2):
            before, data = harness.weights(policy), harness.batch(seed=number)
            compare(harness, policy, engines, torch.bfloat16, f"after {number} steps")
            for name, weight in harness.weights(policy).items():
                harness.exact(f"the trainer's {name} after refit {number + 1}", weight, before[name])
            logprobs = policy.get_logprobs(data)["logprobs"]
            harness.values(f"log-probabilities after refit {number + 1}", logprobs, oracle.logprobs(data))
            harness.step(policy, oracle, data, "nll", f"after refit {number + 1}")

    @holds(6, Capability.IPC_REFIT, Capability.COLLECTIVE_REFIT)
    def test_what_is_announced_is_what_the_trainer_has(self, harness: PolicyHarness) -> None:
        """Every rank must announce the names, full shapes, transfer dtype and bytes of the trainer's weights.

        Receivers allocate memory accordingly.
        """
        policy = harness.policy(generation={"refit": {"dtype": "bfloat16"}})
        right = harness.weights(policy)
        for rank, info in enumerate(policy.everywhere("prepare_info_for_collective")):
            wanted = {name: (tuple(weight.shape), torch.bfloat16) for name, weight in right.items()}
            harness.equal(f"names, shapes and dtypes that rank {rank} announces", dict(info), wanted)
        for rank, (sizes, free) in enumerate(policy.everywhere("prepare_weights_for_ipc")):
            wanted_sizes = {name: 2 * weight.numel() for name, weight in right.items()}
            harness.equal(f"bytes that rank {rank} announces", dict(sizes), wanted_sizes)
            harness.require(free > 0, "a group of weights has room", got=free)

    @holds(8, Capability.IPC_REFIT)
    def test_weights_are_asked_for_after_a_refit_was_begun(self, harness: PolicyHarness) -> None:
        """`get_weights_ipc_handles` must fail before `prepare_weights_for_ipc`, and for unknown names.

        The former is an `AssertionError`, the latter a `UserError`.
        """
        policy = harness.policy()
        method, what = "get_weights_ipc_handles", "handles before prepare_weights_for_ipc must raise AssertionError"
        harness.workers_raise(policy, "AssertionError", what, method, keys=["model.norm.weight"])
        policy.everywhere("prepare_weights_for_ipc")
        what = "an unknown weight must raise UserError"
        harness.workers_raise(policy, "UserError", what, method, keys=["no.such.weight"])

    @holds(7, Capability.COLLECTIVE_REFIT)
    def test_a_late_or_lost_engine_is_reported_and_the_trainer_goes_on(self, harness: PolicyHarness) -> None:
        """If an engine is late or dead, the refit must fail within the deadline and the trainer must stay usable."""
        refit = {"transport": "collective", "deadline": SOON}
        policy = harness.policy(generation={"workers": {}, "refit": refit})
        engines = harness.engines(policy)
        if shares_a_gpu(harness, engines):
            return
        compare(harness, policy, engines, torch.float32, "with all engines running")
        self._refit_without_receiver(harness, policy, "an engine that is late")
        compare(harness, policy, engines, torch.float32, "after an engine was late")
        for info in engines.everywhere("get_info"):
            os.kill(info["pid"], signal.SIGKILL)
        self._refit_without_receiver(harness, policy, "a dead engine")
        compare(harness, policy, harness.engines(policy), torch.float32, "with a new engine")

    @staticmethod
    def _refit_without_receiver(harness: PolicyHarness, policy: InspectedPolicy, what: str) -> None:
        started = time.monotonic()
        raised = policy.inspect(BROADCAST)
        seconds = time.monotonic() - started
        harness.require(raised[0], f"the sending rank must report {what}", got=raised)
        harness.equal(f"errors of the other ranks for {what}", raised[1:], [""] * (len(raised) - 1))
        harness.require(
            seconds < 8 * SOON, f"{what} must be reported by the deadline", got=seconds, expected=f"< {8 * SOON}"
        )
        data = harness.batch()
        harness.values(
            f"log-probabilities after {what}", policy.get_logprobs(data)["logprobs"], harness.oracle().logprobs(data)
        )


def shares_a_gpu(harness: PolicyHarness, engines: InspectedEngines) -> bool:
    """Return True, and note it, if a refit is rejected because trainer and engine share a GPU, where NCCL has no group.

    On other devices this refits nothing.
    """
    if harness.device != "cuda":
        return False
    try:
        engines.refit()
    except ConfigError as error:
        told = "NCCL two processes on the GPU" in str(error)
        harness.require(told, "a process group on a shared GPU must be rejected by name", got=str(error)[:500])
        harness.rejected.append("process groups on a shared GPU")
        return True
    return False


def compare(harness: PolicyHarness, policy: InspectedPolicy, engines: InspectedEngines, dtype: Any, when: str) -> None:
    """Run the driver's whole refit, offload included, and compare the weights of each engine with the trainer's."""
    try:
        engines.refit()
    except RLFrameworkError as error:
        harness.require(False, f"weights arrive {when}", got=f"{type(error).__name__}: {str(error)[:400]}")
    right = {name: weight.to(dtype) for name, weight in harness.weights(policy).items()}
    for held in engines.inspect(HELD):
        harness.equal(f"weights that did not arrive {when}", sorted(right.keys() - held.keys()), [])
        for name, weight in right.items():
            harness.equal(f"dtype of {name} {when}", held[name].dtype, weight.dtype)
            harness.exact(f"bytes of {name} {when}", held[name].view(torch.uint8), weight.view(torch.uint8))

"""Contract 6 for engines in other processes: they hold what the trainer holds, name by name, bit by bit.

The engine is core's own, in a process that has seen no weights. What the trainer holds is read from what it saves, and
cast to the transfer dtype here.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from rlframework.conformance.policies import InspectedEngines, InspectedPolicy
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.policy_worker.workbench import PolicyBench, loss_function
from rlframework.errors import RLFrameworkError
from rlframework.plugins.types import Capability

CALL = "rlframework.conformance.suites.policy_worker.inspection:call"
BROADCAST = "rlframework.conformance.suites.policy_worker.inspection:attempt_to_broadcast"
HELD = "rlframework.conformance.suites.policy_worker.inspection:held_weights"
SMALL = 4096 / 2**20
"""MiB: groups of a few weights, and weights that are larger than a group."""

SOON = 2.0
"""Seconds of the deadline where somebody is to be late."""


class Refit(Suite):
    """Both transports, and what happens where nobody receives."""

    @holds(6, Capability.IPC_REFIT)
    def test_ipc_brings_the_trainers_weights_to_an_engine_in_another_process(self, bench: PolicyBench) -> None:
        """In fp32, before and after a step that moves every weight; twice, since the second is written in place."""
        self._brings(bench, "ipc", torch.float32)

    @holds(6, Capability.COLLECTIVE_REFIT)
    def test_a_process_group_brings_the_trainers_weights_to_an_engine_in_another_process(
        self, bench: PolicyBench
    ) -> None:
        """The same in bfloat16: each weight is the trainer's, rounded once."""
        self._brings(bench, "collective", torch.bfloat16)

    @staticmethod
    def _brings(bench: PolicyBench, transport: str, dtype: torch.dtype) -> None:
        refit = {
            "transport": transport,
            "buffer_mb": SMALL,
            "dtype": str(dtype).removeprefix("torch."),
            "deadline": 30.0,
        }
        policy = bench.policy(generation={"workers": {}, "refit": refit}, optimizer={"lr": 3e-2})
        engines = bench.engines(policy)
        for number in range(2):
            compare(bench, policy, engines, dtype, f"by {transport} after {number} steps")
            policy.train(bench.batch(seed=number), loss_function("nll"))
        compare(bench, policy, engines, dtype, f"by {transport} after 2 steps")

    @holds(6, Capability.IPC_REFIT, Capability.COLLECTIVE_REFIT)
    def test_what_is_announced_is_what_the_trainer_has(self, bench: PolicyBench) -> None:
        """Names, whole shapes, the transfer dtype and bytes, on every rank; receivers make room by it."""
        policy = bench.policy(generation={"refit": {"dtype": "bfloat16"}})
        right = bench.weights(policy)
        for rank, info in enumerate(policy.everywhere("prepare_info_for_collective")):
            wanted = {name: (tuple(weight.shape), torch.bfloat16) for name, weight in right.items()}
            bench.equal(f"names, shapes and dtypes that rank {rank} announces", dict(info), wanted)
        for rank, (sizes, free) in enumerate(policy.everywhere("prepare_weights_for_ipc")):
            wanted_sizes = {name: 2 * weight.numel() for name, weight in right.items()}
            bench.equal(f"bytes that rank {rank} announces", dict(sizes), wanted_sizes)
            bench.require(free > 0, "there are bytes for a group of weights", got=free)

    @holds(8, Capability.IPC_REFIT)
    def test_weights_are_asked_for_after_a_refit_was_begun(self, bench: PolicyBench) -> None:
        """An assertion, and nothing is shared; so are names that there are not, by an error of the user."""
        policy = bench.policy()
        asked = {"method": "get_weights_ipc_handles", "arguments": {"keys": ["model.norm.weight"]}}
        for told in policy.inspect(CALL, **asked):
            bench.require("AssertionError" in told, "handles before prepare_weights_for_ipc are refused", got=told)
        policy.everywhere("prepare_weights_for_ipc")
        for told in policy.inspect(CALL, method="get_weights_ipc_handles", arguments={"keys": ["no.such.weight"]}):
            bench.require("UserError" in told, "a weight that is not there is refused", got=told)

    @holds(7, Capability.COLLECTIVE_REFIT)
    def test_an_engine_that_is_late_or_gone_is_told_and_the_trainer_goes_on(self, bench: PolicyBench) -> None:
        """All ranks leave the call within the deadline, and both score and send weights as before."""
        refit = {"transport": "collective", "deadline": SOON}
        policy = bench.policy(generation={"workers": {}, "refit": refit})
        engines = bench.engines(policy)
        compare(bench, policy, engines, torch.float32, "while all are there")
        self._nobody_receives(bench, policy, "an engine that does not receive")
        compare(bench, policy, engines, torch.float32, "after an engine was late")
        for info in engines.everywhere("get_info"):
            os.kill(info["pid"], signal.SIGKILL)
        self._nobody_receives(bench, policy, "an engine that is gone")
        compare(bench, policy, bench.engines(policy), torch.float32, "with a new engine")

    @staticmethod
    def _nobody_receives(bench: PolicyBench, policy: InspectedPolicy, what: str) -> None:
        begun = time.monotonic()
        told = policy.inspect(BROADCAST)
        seconds = time.monotonic() - begun
        bench.require(told[0], f"{what} is told by the rank that sends", got=told)
        bench.equal(f"what the other ranks say of {what}", told[1:], [""] * (len(told) - 1))
        bench.require(seconds < 5 * SOON, f"{what} is told by the deadline", got=seconds, expected=f"< {5 * SOON}")
        data = bench.batch()
        bench.values(
            f"log-probabilities after {what}", policy.get_logprobs(data)["logprobs"], bench.oracle().logprobs(data)
        )


def compare(bench: PolicyBench, policy: InspectedPolicy, engines: InspectedEngines, dtype: Any, when: str) -> None:
    """Refit, and look at what each engine holds."""
    try:
        engines.refitter.refit()
    except RLFrameworkError as error:
        bench.require(False, f"weights arrive {when}", got=f"{type(error).__name__}: {str(error)[:400]}")
    right = {name: weight.to(dtype) for name, weight in bench.weights(policy).items()}
    for held in engines.inspect(HELD):
        bench.equal(f"weights that did not arrive {when}", sorted(right.keys() - held.keys()), [])
        for name, weight in right.items():
            bench.equal(f"dtype of {name} {when}", held[name].dtype, weight.dtype)
            bench.exact(f"bytes of {name} {when}", held[name].view(torch.uint8), weight.view(torch.uint8))

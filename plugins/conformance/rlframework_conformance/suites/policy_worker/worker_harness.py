"""The harness of the policy-worker suite: policies of the backend under test, the oracle, and losses by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from rlframework.algorithms.losses import ClippedPGLoss, NLLLoss
from rlframework.base.errors import ConfigError, NotSupported
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import ClippedPGLossConfig
from rlframework.config.sections import RunConfig
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.loss import LossFunction
from rlframework.plugins.types import Capability
from rlframework_conformance import cases
from rlframework_conformance.contracts import FP32
from rlframework_conformance.harness import Harness
from rlframework_conformance.layouts import Layout
from rlframework_conformance.oracle import Oracle, OracleStep
from rlframework_conformance.policies import InspectedEngines, InspectedPolicy, read_weights, run_config
from rlframework_conformance.suites.policy_worker.losses import (
    PairsLoss,
    ScorePairsLoss,
    ScoresLoss,
    SetsLoss,
    ValuesLoss,
)

CALL = "rlframework_conformance.inspected_worker:call"
"""Path of the function that calls a method of a worker and returns what it raised."""
PROBE_LR, PROBE_EPS = 1e6, 1e3
PROBE: dict[str, Any] = {
    "optimizer": {"lr": PROBE_LR, "eps": PROBE_EPS, "weight_decay": 0.0},
    "max_grad_norm": None,
}
"""Keys of `policy` under which the first step reveals the gradient itself.

With an epsilon far above the gradient g, AdamW's first update is lr * g / (|g| + eps), which can be solved for g, so a
gradient is read from the weights alone.
"""


OWN_LOSSES: Mapping[str, type[NLLLoss]] = {
    "pairs": PairsLoss,
    "sets": SetsLoss,
    "values": ValuesLoss,
    "scores": ScoresLoss,
    "score_pairs": ScorePairsLoss,
}
"""Losses of the suite by the names that they have in the oracle."""


def loss_function(kind: str) -> LossFunction:
    """Return the framework's loss for the oracle's loss `kind`."""
    if kind == "nll":
        return NLLLoss()
    if kind in OWN_LOSSES:
        return OWN_LOSSES[kind]()
    config = ClippedPGLossConfig(
        ratio_clip_min=0.2, ratio_clip_max=0.2, kl_coef=0.0, level="sequence" if kind == "sequence_pg" else "token"
    )
    return ClippedPGLoss(config)


@dataclass
class PolicyHarness(Harness):
    """The harness of `PolicyWorkerSuite`. It shuts down the policies it starts when the test ends."""

    started: InspectedPolicy | None = None

    def close(self) -> None:
        """Shut down the current policy."""
        if self.started is not None:
            self.started.shutdown()
            self.started = None
        super().close()

    def model(self, name: str = "untied") -> Path:
        """Return the directory of a tiny model of `cases.MODELS`, with two layers per pipeline stage."""
        return cases.model(name, self.models, layers=cases.LAYERS * self.layout.pipeline)

    def batchings(self, tokens: int) -> list[dict[str, Any]]:
        """Return `policy.batching` for each mode that the backend declares, with a limit of `tokens`."""
        needs = {"dynamic": Capability.DYNAMIC_BATCHING, "packed": Capability.PACKING}
        modes = ["padded", *(mode for mode, need in needs.items() if need in self.record.capabilities)]
        return [{"mode": mode, "tokens": tokens} for mode in modes]

    def supports(self, layout: Layout) -> bool:
        """Return True if the backend supports `layout` with the section under test."""
        try:
            self._configure(self.model(), layout)
        except ConfigError:
            return False
        return True

    def policy(
        self,
        model: str | Path = "untied",
        *,
        reference: bool = False,
        trains: bool = True,
        generation: dict[str, Any] | None = None,
        deadlines: dict[str, float] | None = None,
        apart: bool = False,
        layout: Layout | None = None,
        **keys: Any,
    ) -> InspectedPolicy:
        """Build a policy of the backend in the layout under test; `keys` are keys of the section `policy`.

        Only one exists at a time: the previous policy is shut down first, because an engine may have state that exists
        once per process. `apart` puts even a single worker into a separate process. With `trains=False` it has no
        optimizer.
        """
        self.close()
        path = self.model(model) if isinstance(model, str) else model
        config = self._configure(
            path, layout or self.layout, generation=generation, deadlines=deadlines, apart=apart, **keys
        )
        policy = InspectedPolicy(
            config,
            load_tokenizer(str(path)),
            self.manager,
            device=self.device,
            init_reference_model=reference,
            init_optimizer=trains,
            mutant=self.mutant,
        )
        self.started = policy
        return policy

    def policy_unless_rejected(self, model: str, kind: str, words: str, **keys: Any) -> InspectedPolicy | None:
        """Build a policy of `model`, or return None and note `kind` if the backend rejects it, as it may.

        The rejection must come before any work, as a `NotSupported` or `ConfigError` that says so by matching `words`.
        """
        try:
            return self.policy(model, **keys)
        except (NotSupported, ConfigError) as error:
            self.require(
                re.search(words, str(error), re.IGNORECASE),
                f"a rejection of {kind} must name it, in words that match {words!r}",
                got=str(error)[:500],
                expected=words,
            )
            self.rejected.append(kind)
            return None

    def _configure(self, model: Path, layout: Layout, **keys: Any) -> RunConfig:
        """Return the run configuration for these keys and the section under test."""
        if self.section:
            keys.setdefault(self.record.name, dict(self.section))
        return run_config(
            self.record.name,
            model,
            layout,
            manager=self.manager,
            device=self.device,
            folder=self.folder,
            **keys,
        )

    def resumed(self, checkpoint: tuple[str, str | None], model: str = "untied", **keys: Any) -> InspectedPolicy:
        """Build a policy, as `policy` does, and load the paths of a checkpoint's weights and optimizer."""
        policy = self.policy(model, **keys)
        policy.load_checkpoint(*checkpoint)
        return policy

    def workers_raise(self, policy: InspectedPolicy, error: str, what: str, method: str, **arguments: Any) -> None:
        """Require `method` of each worker to raise an `error`; `what` states so."""
        for raised in policy.inspect(CALL, method=method, arguments=arguments):
            self.require(error in raised, what, got=raised)

    def engines(self, policy: InspectedPolicy) -> InspectedEngines:
        """Start generation workers for `policy` in separate processes; they are ended with the test."""
        tokenizer = load_tokenizer(policy.config.policy.model_name)
        engines = InspectedEngines(policy.config, policy, tokenizer, self.manager, device=self.device)
        self.resources.callback(engines.shutdown)
        return engines

    def oracle(self, model: str = "untied", **settings: Any) -> Oracle:
        """Return the oracle for the same model."""
        return Oracle(self.model(model), **settings)

    def batch(self, rows: int = 8, *, seed: int = 0) -> BatchedDataDict[Any]:
        """Return a batch of `cases.batch` whose `prev_logprobs` are near those of the model `untied`."""
        return cases.with_prev_logprobs(cases.batch(rows, seed=seed), _logprobs(self.model(), rows, seed), seed)

    def weights(self, policy: InspectedPolicy) -> dict[str, Tensor]:
        """Return the weights that `policy` saves."""
        folder = self.folder / f"weights-{len(list(self.folder.iterdir()))}"
        policy.save_pretrained(str(folder))
        return read_weights(folder)

    def gradient(self, policy: InspectedPolicy, before: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradient of the single step that `policy`, built with `PROBE`, took from the weights `before`."""
        return probed_gradient(before, self.weights(policy))

    def step(self, policy: InspectedPolicy, oracle: Oracle, data: BatchedDataDict[Any], kind: str, what: str) -> None:
        """Take one step with both and compare loss and gradient norm."""
        self.compare_step(policy, oracle.step(data, kind), data, kind, what)

    def steps(self, policy: InspectedPolicy, oracle: Oracle, seeds: range, kind: str, what: str) -> None:
        """Take one step for each of `seeds` with both, as `step` does."""
        for seed in seeds:
            self.step(policy, oracle, self.batch(seed=seed), kind, f"{what}, step {seed + 1}")

    def compare_step(
        self, policy: InspectedPolicy, right: OracleStep, data: BatchedDataDict[Any], kind: str, what: str
    ) -> None:
        """Take one step and compare loss and gradient norm with those of the oracle's."""
        policy.prepare_for_training()
        result = policy.train(data, loss_function(kind))
        self.scalar(f"loss, {what}", result["loss"], right.loss)
        self.scalar(f"gradient norm, {what}", result["grad_norm"][0], right.grad_norm)

    def first_step(
        self,
        data: BatchedDataDict[Any],
        what: str,
        *,
        kind: str = "pg",
        model: str = "untied",
        head: str = "language",
        **keys: Any,
    ) -> None:
        """Compare log-probabilities, loss, gradient norm and gradients of the first step with the oracle.

        With another `head` than that of language, there are no log-probabilities.
        """
        policy = self.policy(model, head=head, **PROBE, **keys)
        oracle = self.oracle(model, head=None if head == "language" else "checkpoint", max_grad_norm=None)
        if head == "language":
            self.values(f"log-probabilities, {what}", policy.get_logprobs(data)["logprobs"], oracle.logprobs(data))
        before, gradients = oracle.weights(), oracle.gradients(data, kind)
        self.step(policy, oracle, data, kind, what)
        found = self.gradient(policy, before)
        self.tensors(f"gradient, {what}", found, gradients, FP32, FP32)


def probed_gradient(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of a single step with `PROBE` from the weights before and after it."""
    updates = {name: (before[name] - after[name]).double() for name in before}
    return {name: PROBE_EPS * update / (PROBE_LR - update.abs()) for name, update in updates.items()}


@cache
def _logprobs(model: Path, rows: int, seed: int) -> Tensor:
    """Return the oracle's log-probabilities of a batch that many tests use, computed once per process."""
    return Oracle(model).logprobs(cases.batch(rows, seed=seed))

"""What the tests of the policy-worker suite work with: policies of the backend, the oracle, and losses by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from rlframework.algorithms.losses import ClippedPGLoss, NLLLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import ClippedPGLossConfig
from rlframework.config.sections import RunConfig
from rlframework.conformance import cases
from rlframework.conformance.bench import Bench
from rlframework.conformance.contracts import FP32
from rlframework.conformance.layouts import Layout
from rlframework.conformance.oracle import Oracle
from rlframework.conformance.policies import InspectedEngines, InspectedPolicy, read_weights, run_config
from rlframework.errors import ConfigError
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.loss import LossFunction

PROBE_LR, PROBE_EPS = 1e6, 1e3
PROBE: dict[str, Any] = {
    "optimizer": {"lr": PROBE_LR, "eps": PROBE_EPS, "weight_decay": 0.0},
    "max_grad_norm": None,
}
"""Keys under which the first step shows the gradient itself: with an epsilon far above the gradient g, AdamW's first
update is lr * g / (|g| + eps), which can be solved for g. So a gradient is read from weights alone."""


def loss_function(kind: str) -> LossFunction:
    """The framework's loss for what the oracle calls `kind`."""
    if kind == "nll":
        return NLLLoss()
    config = ClippedPGLossConfig(
        ratio_clip_min=0.2, ratio_clip_max=0.2, kl_coef=0.0, level="sequence" if kind == "sequence_pg" else "token"
    )
    return ClippedPGLoss(config)


@dataclass
class PolicyBench(Bench):
    """The bench of `PolicyWorkerSuite`. What it starts is shut down when the test is over."""

    started: InspectedPolicy | None = None

    def close(self) -> None:
        """Shut the policy down."""
        if self.started is not None:
            self.started.shutdown()
            self.started = None
        super().close()

    def model(self, name: str = "untied") -> Path:
        """Directory of a tiny model of `cases.MODELS`: two layers, with a pipeline two a stage, which may be parts."""
        return cases.model(name, self.models, layers=cases.LAYERS * self.layout.pipeline)

    def takes(self, layout: Layout) -> bool:
        """Whether the backend, with its section as it is here, can be split like `layout`."""
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
        """A policy of the backend in the layout under test; `keys` of the section `policy`.

        One at a time: the one before it is shut down, because engines may have state that a process has once. `apart`:
        in processes of its own even where it is one worker. Without `trains` it has no optimizer.
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

    def _configure(self, model: Path, layout: Layout, **keys: Any) -> RunConfig:
        """What `run_config` makes of them and of the section."""
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

    def engines(self, policy: InspectedPolicy) -> InspectedEngines:
        """Generation workers as `policy` is configured to have them, in processes of their own; ended with the test."""
        tokenizer = load_tokenizer(policy.config.policy.model_name)
        engines = InspectedEngines(policy.config, policy, tokenizer, self.manager, device=self.device)
        self.resources.callback(engines.shutdown)
        return engines

    def oracle(self, model: str = "untied", **settings: Any) -> Oracle:
        """The oracle on the same model."""
        return Oracle(self.model(model), **settings)

    def batch(self, rows: int = 8, *, seed: int = 0) -> BatchedDataDict[Any]:
        """A batch of `cases.batch` whose `prev_logprobs` are near those of the model `untied`."""
        return cases.with_prev_logprobs(cases.batch(rows, seed=seed), _logprobs(self.model(), rows, seed), seed)

    def weights(self, policy: InspectedPolicy) -> dict[str, Tensor]:
        """The weights of `policy`, as it saves them."""
        folder = self.folder / f"weights-{len(list(self.folder.iterdir()))}"
        policy.save_pretrained(str(folder))
        return read_weights(folder)

    def gradient(self, policy: InspectedPolicy, before: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradient of the one step that `policy`, made with `PROBE`, took from the weights `before`."""
        after = self.weights(policy)
        updates = {name: (before[name] - after[name]).double() for name in before}
        return {name: PROBE_EPS * update / (PROBE_LR - update.abs()) for name, update in updates.items()}

    def step(self, policy: InspectedPolicy, oracle: Oracle, data: BatchedDataDict[Any], kind: str, what: str) -> None:
        """One step on both: equal loss and gradient norm."""
        policy.prepare_for_training()
        result, right = policy.train(data, loss_function(kind)), oracle.step(data, kind)
        self.scalar(f"loss, {what}", result["loss"], right.loss)
        self.scalar(f"gradient norm, {what}", result["grad_norm"][0], right.grad_norm)

    def first_step(
        self, data: BatchedDataDict[Any], what: str, *, kind: str = "pg", model: str = "untied", **keys: Any
    ) -> None:
        """Log-probabilities, loss, gradient norm and the gradient of each tensor of a step, against the oracle."""
        policy, oracle = self.policy(model, **PROBE, **keys), self.oracle(model)
        self.values(f"log-probabilities, {what}", policy.get_logprobs(data)["logprobs"], oracle.logprobs(data))
        before, gradients = oracle.weights(), oracle.gradients(data, kind)
        oracle.max_grad_norm = None
        self.step(policy, oracle, data, kind, what)
        found = self.gradient(policy, before)
        self.tensors(f"gradient, {what}", found, gradients, FP32, FP32)


@cache
def _logprobs(model: Path, rows: int, seed: int) -> Tensor:
    """The oracle's, of a batch that hundreds of tests ask for: worked out once a process."""
    return Oracle(model).logprobs(cases.batch(rows, seed=seed))

"""Replay a recorded step on each backend, to find out why a run behaves differently on another engine.

Both sides start with a fresh optimizer, because its moments are not recorded. The run's own figures are therefore
comparable up to its first optimizer step: log-probabilities, and that step's loss and gradient norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.policy import PolicyConfig
from rlframework.conformance.layouts import Layout
from rlframework.conformance.parity import measurements
from rlframework.conformance.parity.outcome import LOSS, NORM, Candidate, Observed, Outcome
from rlframework.conformance.parity.scenario import Scenario, oracle_step_with

if TYPE_CHECKING:
    from rlframework.conformance.measure import Measurement
    from rlframework.conformance.parity.recorded_step import RecordedStep

FLOOR = 1.0
"""Losses are compared relative to at least this; with advantages around 0 a loss is a small difference."""

_OF_CANDIDATE = {
    "model_name",
    "tokenizer_name",
    "backend",
    "parallelism",
    "precision",
    "optimizer",
    "scheduler",
    "lora",
}
"""Keys of `policy` that come from the candidate or the scenario instead of the run."""


def recorded_scenario(recorded: RecordedStep) -> Scenario:
    """Return the scenario of a recorded step: one global batch per optimizer step, with the run's settings and learning
    rate.
    """
    policy = recorded.policy
    rows = policy["train_global_batch_size"]
    batches: list[BatchedDataDict[Any]] = [
        recorded.data.slice(start, start + rows) for start in range(0, recorded.data.size, rows)
    ]
    optimizer = policy["optimizer"]
    return Scenario(
        name=type(recorded.loss).__name__,
        model=recorded.model,
        batches=batches,
        loss=recorded.loss,
        oracle_step=oracle_step_with(recorded.loss),
        lr=optimizer["lr"] if recorded.result is None else recorded.result["lr"],
        temperature=recorded.temperature,
        optimizer={name: optimizer[name] for name in ("betas", "eps", "weight_decay")},
        max_grad_norm=policy["max_grad_norm"],
        settings={name: policy[name] for name in PolicyConfig.model_fields if name not in _OF_CANDIDATE},
        sections={policy["backend"]: policy[policy["backend"]]} if policy.get(policy["backend"]) else {},
        floor=FLOOR,
    )


def run_candidate(recorded: RecordedStep) -> Candidate:
    """Return the run itself as a candidate: its backend, layout and precision."""
    policy, workers = recorded.policy, recorded.config["worker_group"]["num_workers"]
    sizes = dict(policy["parallelism"])
    data = workers // (sizes["tensor"] * sizes["context"] * sizes["pipeline"])
    return Candidate(policy["backend"], Layout(data=data, **sizes), policy["precision"], recorded.config["device"])


def run_outcome(recorded: RecordedStep, scenario: Scenario) -> Outcome:
    """Compare the run's own figures with the oracle."""
    rows = scenario.batches[0].size
    logprobs = list(recorded.logprobs.split(rows))
    candidate = run_candidate(recorded)
    if recorded.result is None:
        found: dict[str, Measurement] = measurements.logprobs_measured(logprobs, scenario.answers.logprobs)
        reason = f"the step failed in the run: {recorded.failure}"
        return Outcome(candidate, scenario.name, found, reason=reason, is_run=True)
    outcome = measurements.compare_results(scenario, candidate, logprobs, _first_step(recorded), None)
    return replace(outcome, is_run=True)


def _first_step(recorded: RecordedStep) -> list[tuple[float, float]]:
    """Return the loss and gradient norm of the run's first optimizer step."""
    assert recorded.result is not None
    return [(float(recorded.result["global_loss"][0]), float(recorded.result["grad_norm"][0]))]


def against_run(recorded: RecordedStep, scenario: Scenario, observed: Observed) -> dict[str, Measurement]:
    """Compare a backend with the run's own figures: log-probabilities and the first optimizer step."""
    rows = scenario.batches[0].size
    found = measurements.logprobs_measured(observed.logprobs, list(recorded.logprobs.split(rows)))
    if recorded.result is not None:
        (loss, norm), (own_loss, own_norm) = observed.steps[0], _first_step(recorded)[0]
        found[LOSS] = measurements.loss_measured(scenario, 1, loss, own_loss)
        found[NORM] = measurements.norm_measured(1, norm, own_norm)
    return found

"""A recorded step once more, on each backend: "my run behaves differently on the other engine".

The optimizer is fresh on both sides, because its moments are not recorded. So the run's own figures are comparable up
to its first optimizer step: log-probabilities, and that step's loss and gradient norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.policy import PolicyConfig
from rlframework.conformance.layouts import Layout
from rlframework.conformance.parity import measurements
from rlframework.conformance.parity.outcome import LOSS, NORM, Outcome, Seen, Subject
from rlframework.conformance.parity.reference import Exam, taking

if TYPE_CHECKING:
    from rlframework.conformance.measure import Measurement
    from rlframework.conformance.parity.recorded_step import RecordedStep

FLOOR = 1.0
"""Losses are compared relative to at least this: with advantages around 0 a loss is a difference of large numbers."""

_OF_SUBJECT = {"model_name", "tokenizer_name", "backend", "parallelism", "precision", "optimizer", "scheduler", "lora"}
"""Keys of `policy` that are not taken from the run: the subject has them, or the exam."""


def exam_of(recorded: RecordedStep) -> Exam:
    """What `recorded` did: a global batch a step, with the run's settings and that step's learning rate."""
    policy = recorded.policy
    rows = policy["train_global_batch_size"]
    batches: list[BatchedDataDict[Any]] = [
        recorded.data.slice(start, start + rows) for start in range(0, recorded.data.size, rows)
    ]
    optimizer = policy["optimizer"]
    return Exam(
        name=type(recorded.loss).__name__,
        model=recorded.model,
        batches=batches,
        loss=recorded.loss,
        take=taking(recorded.loss),
        lr=optimizer["lr"] if recorded.result is None else recorded.result["lr"],
        temperature=recorded.temperature,
        optimizer={name: optimizer[name] for name in ("betas", "eps", "weight_decay")},
        max_grad_norm=policy["max_grad_norm"],
        settings={name: policy[name] for name in PolicyConfig.model_fields if name not in _OF_SUBJECT},
        sections={policy["backend"]: policy[policy["backend"]]} if policy.get(policy["backend"]) else {},
        floor=FLOOR,
    )


def run_subject(recorded: RecordedStep) -> Subject:
    """The run itself: its backend, layout and precision."""
    policy, workers = recorded.policy, recorded.config["worker_group"]["num_workers"]
    sizes = dict(policy["parallelism"])
    data = workers // (sizes["tensor"] * sizes["context"] * sizes["pipeline"])
    return Subject(policy["backend"], Layout(data=data, **sizes), policy["precision"], recorded.config["device"])


def run_outcome(recorded: RecordedStep, exam: Exam) -> Outcome:
    """What the run itself saw, beside the oracle."""
    rows = exam.batches[0].size
    logprobs = list(recorded.logprobs.split(rows))
    subject = run_subject(recorded)
    if recorded.result is None:
        found: dict[str, Measurement] = measurements.logprobs_measured(logprobs, exam.answers.logprobs)
        reason = f"the step failed in the run: {recorded.failure}"
        return Outcome(subject, exam.name, found, reason=reason, is_run=True)
    outcome = measurements.compared(exam, subject, logprobs, _first_step(recorded), None)
    return replace(outcome, is_run=True)


def _first_step(recorded: RecordedStep) -> list[tuple[float, float]]:
    """The loss and norm of the run's first optimizer step."""
    assert recorded.result is not None
    return [(float(recorded.result["global_loss"][0]), float(recorded.result["grad_norm"][0]))]


def against_run(recorded: RecordedStep, exam: Exam, seen: Seen) -> dict[str, Measurement]:
    """How far a backend is from what the run saw: log-probabilities, and the first optimizer step."""
    rows = exam.batches[0].size
    found = measurements.logprobs_measured(seen.logprobs, list(recorded.logprobs.split(rows)))
    if recorded.result is not None:
        (loss, norm), (own_loss, own_norm) = seen.steps[0], _first_step(recorded)[0]
        found[LOSS] = measurements.loss_measured(exam, 1, loss, own_loss)
        found[NORM] = measurements.norm_measured(1, norm, own_norm)
    return found

"""`examine`: one backend beside the oracle, measured, and searched for the first difference where there is one."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlframework.conformance.parity.divergence import find_divergence
from rlframework.conformance.parity.measurements import compared, opened, step
from rlframework.conformance.parity.outcome import Outcome, Seen, Subject
from rlframework.conformance.policies import InspectedPolicy, weights_of
from rlframework.errors import RLFrameworkError, UserError

if TYPE_CHECKING:
    from rlframework.conformance.parity.reference import Exam
    from rlframework.plugins.manager import PluginManager


def examine(exam: Exam, subject: Subject, *, manager: PluginManager, folder: Path, named: bool) -> Outcome:
    """Put `subject` through `exam`, and look for where it parts from the oracle if it does.

    `named`: somebody asked for this subject, so that it is an error where it cannot be made.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        try:
            policy = stack.enter_context(opened(exam, subject, manager))
        except UserError as error:
            return Outcome(subject, exam.name, reason=first_line(error), error=named, made=False)
        except Exception as error:  # noqa: BLE001 - a backend that breaks is told, and the others go on
            return Outcome(subject, exam.name, reason=first_line(error), error=True)
        try:
            outcome = _measured(exam, subject, policy, folder)
        except Exception as error:  # noqa: BLE001 - as above, and whatever it is: it could be made, so it should work
            return Outcome(subject, exam.name, reason=first_line(error), error=True)
    if outcome.fails:
        outcome = replace(outcome, divergence=find_divergence(exam, subject, manager=manager, folder=folder))
    return replace(outcome, seconds=time.perf_counter() - started)


def _measured(exam: Exam, subject: Subject, policy: InspectedPolicy, folder: Path) -> Outcome:
    logprobs = [policy.get_logprobs(batch)["logprobs"] for batch in exam.batches]
    policy.prepare_for_training()
    steps = [step(policy, exam, batch) for batch in exam.batches[:1]]
    first = last = weights_of(policy, folder / "weights")
    if later := [step(policy, exam, batch) for batch in exam.batches[1:]]:
        steps, last = steps + later, weights_of(policy, folder / "weights")
    outcome = compared(exam, subject, logprobs, steps, (first, last))
    return replace(outcome, seen=Seen(logprobs, steps))


def first_line(error: BaseException) -> str:
    """The beginning of what an error says; of a worker's, the end of its traceback."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = lines[0] if not lines[0].endswith(":") else f"{lines[0]} {lines[-1]}"
    return text if isinstance(error, RLFrameworkError) else f"{type(error).__name__}: {text}"

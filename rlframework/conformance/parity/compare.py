"""Run one backend on a scenario, measure it against the oracle, and locate the first difference."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlframework.conformance.parity.divergence import find_divergence
from rlframework.conformance.parity.measurements import compare_results, open_policy, step
from rlframework.conformance.parity.outcome import Candidate, Observed, Outcome
from rlframework.conformance.policies import InspectedPolicy, weights_of
from rlframework.errors import RLFrameworkError, UserError

if TYPE_CHECKING:
    from rlframework.conformance.parity.scenario import Scenario
    from rlframework.plugins.manager import PluginManager


def compare_with_oracle(
    scenario: Scenario, candidate: Candidate, *, manager: PluginManager, folder: Path, named: bool
) -> Outcome:
    """Run `candidate` on `scenario` and, if it fails, find where it first diverges from the oracle.

    `named`: the user named this candidate, so failing to build it is an error.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        try:
            policy = stack.enter_context(open_policy(scenario, candidate, manager))
        except UserError as error:
            return Outcome(candidate, scenario.name, reason=first_line(error), error=named, built=False)
        except Exception as error:  # noqa: BLE001 - a broken backend is reported, the others continue
            return Outcome(candidate, scenario.name, reason=first_line(error), error=True)
        try:
            outcome = _measured(scenario, candidate, policy, folder)
        except Exception as error:  # noqa: BLE001 - as above, also for user errors: it was built, so it must run
            return Outcome(candidate, scenario.name, reason=first_line(error), error=True)
    if outcome.fails:
        outcome = replace(outcome, divergence=find_divergence(scenario, candidate, manager=manager, folder=folder))
    return replace(outcome, seconds=time.perf_counter() - started)


def _measured(scenario: Scenario, candidate: Candidate, policy: InspectedPolicy, folder: Path) -> Outcome:
    logprobs = [policy.get_logprobs(batch)["logprobs"] for batch in scenario.batches]
    policy.prepare_for_training()
    steps = [step(policy, scenario, batch) for batch in scenario.batches[:1]]
    first = last = weights_of(policy, folder / "weights")
    if later := [step(policy, scenario, batch) for batch in scenario.batches[1:]]:
        steps, last = steps + later, weights_of(policy, folder / "weights")
    outcome = compare_results(scenario, candidate, logprobs, steps, (first, last))
    return replace(outcome, observed=Observed(logprobs, steps))


def first_line(error: BaseException) -> str:
    """Return the first line of an error message; for a worker's error, with the end of its traceback."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = lines[0] if not lines[0].endswith(":") else f"{lines[0]} {lines[-1]}"
    return text if isinstance(error, RLFrameworkError) else f"{type(error).__name__}: {text}"

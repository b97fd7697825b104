"""Runs with engines that have a fault end before the second optimizer step, with one error that names engine and fault.

The faults are those of `wrong_engines`. `fp32` rounds by less than 1e-5 nats here, so each is far beyond its bound.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from probe_runs import rows_of

from rlframework import run
from rlframework.base.errors import EngineFault, RefitError, RLFrameworkError, SamplingMismatch

pytestmark = pytest.mark.slow

QUIET = "algorithm.validation={at_start: false, at_end: false, every: 0}"
OF_ITS_OWN = "generation.workers.group=inline"
UNPROVEN = (OF_ITS_OWN, "generation.refit.probes=0")
ASYNCHRONOUS = ("generation.workers.group=processes", "algorithm.async={max_staleness: 1}", "generation.refit.probes=0")


@pytest.fixture
def end_of(run_config: Any) -> Any:
    def end(engine: str, *overrides: str) -> tuple[RLFrameworkError, int]:
        """Return the error of a run with the engine `wrong_ENGINE`, and the steps that it finished."""
        config = run_config(
            "grpo",
            'plugins=["probe_tasks", "probe_games", "wrong_engines"]',
            f"generation.name=wrong_{engine}",
            "generation.temperature=0.85",
            QUIET,
            *overrides,
        )
        with pytest.raises(RLFrameworkError) as raised:
            run(config)
        metrics: Path = config.output_dir / "metrics.jsonl"
        return raised.value, len(rows_of(metrics)) if metrics.exists() else 0

    return end


@pytest.mark.parametrize(
    ("fault", "steps", "where"),
    [
        ("frozen_graph", 1, "later ones by 0.0"),
        ("previous_version_after_the_first_token", 1, "later ones by 0.0"),
        ("many_rows_on_old_weights", 1, "first tokens of rows differ by 0.0"),
        ("later_tokens_at_temperature_one", 0, "later ones by 0.0"),
        ("temperature_rounded", 0, "first tokens of rows differ by 0.0"),
        ("all_zero", 0, "32 of 32 rows are within a factor of four"),
        ("other_token", 0, "first tokens of rows differ by 0."),
        ("exchanged_results", 0, "later ones by 0.0"),
    ],
)
def test_the_trainer_finds_an_embedded_engine_that_samples_otherwise(
    end_of: Any, fault: str, steps: int, where: str
) -> None:
    """In the first step whose tokens show it; of that step, no weight is updated."""
    error, finished = end_of(fault)
    assert isinstance(error, SamplingMismatch)
    assert f"step {steps + 1}: the log-probabilities that generation engine 'wrong_{fault}' returned" in str(error)
    assert "No optimizer step was taken" in str(error)
    assert where in str(error)
    assert finished == steps


@pytest.mark.parametrize(
    ("fault", "version"),
    [
        ("frozen_graph", 2),
        ("long_prompts_on_old_weights", 2),
        ("some_sessions_on_old_weights", 2),
        ("later_tokens_at_temperature_one", 0),
        ("scaled_norm", 0),
        ("all_zero", 0),
    ],
)
def test_probes_of_a_refit_find_an_engine_that_decodes_otherwise(end_of: Any, fault: str, version: int) -> None:
    """Before a token is sampled: with the first weights, or with the first that were trained."""
    error, finished = end_of(fault, OF_ITS_OWN)
    assert isinstance(error, RefitError)
    assert f"generation engine 0 was refit to version {version}, but gives token" in str(error)
    assert finished == int(version > 0)


@pytest.mark.parametrize(
    ("fault", "kind", "overrides"),
    [
        ("frozen_graph", SamplingMismatch, UNPROVEN),
        ("scaled_norm", SamplingMismatch, UNPROVEN),
        ("other_version", EngineFault, UNPROVEN),
        ("other_version", EngineFault, ASYNCHRONOUS),
        ("scaled_norm", SamplingMismatch, ASYNCHRONOUS),
        ("no_spans", EngineFault, ASYNCHRONOUS),
        ("no_spans", EngineFault, ("~environment", "environment={name: two_turns, max_episode_tokens: 24}")),
        ("never_stops", EngineFault, ()),
        ("not_a_number", EngineFault, ()),
    ],
)
def test_without_probes_results_and_trainer_find_them(
    end_of: Any, fault: str, kind: type[Exception], overrides: tuple[str, ...]
) -> None:
    error, finished = end_of(fault, *overrides)
    assert isinstance(error, kind), error
    assert f"wrong_{fault}'" in str(error)
    assert finished <= 1


def test_a_run_may_be_told_to_go_on(run_config: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = run_config(
        "grpo",
        'plugins=["probe_tasks", "wrong_engines"]',
        "generation.name=wrong_all_zero",
        "generation.logprob_check.action=warn",
        QUIET,
    )
    assert run(config).metrics["step"] == 3
    assert sum("not the policy's" in record.getMessage() for record in caplog.records) == 3

"""Signals whose exception is lost: it is raised in a `__del__`, where Python drops it. The run ends all the same."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from probe_runs import rows_of

from rlframework import run
from rlframework.algorithms.checkpoints import Checkpoints
from rlframework.algorithms.ending import ending_on_signals, raise_if_ended
from rlframework.algorithms.loop import Timer
from rlframework.base.errors import RunInterrupted, RunTerminated, WorkerLost
from rlframework.policy.client import Policy

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


class Signalled:
    """Gets a signal while it is deleted: its handler runs in `__del__`."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)
        raise AssertionError("the handler has not run here")


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException]]:
    """The kinds of exceptions that Python has dropped."""
    kinds: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: kinds.append(lost.exc_type))
    return kinds


@pytest.mark.parametrize("number", CODES)
def test_a_lost_signal_ends_the_run_at_the_next_phase(number: signal.Signals, dropped: list[Any]) -> None:
    @ending_on_signals()
    def phases(begins: bool) -> None:
        if begins:
            Signalled(number)
        with Timer().phase("train"):
            if not begins:
                Signalled(number)
            reached.append("phase")
        reached.append("after it")

    for begins in (True, False):
        reached: list[str] = []
        with pytest.raises(RunTerminated) as caught:
            phases(begins)
        assert caught.value.exit_code == CODES[number]
        assert reached == ([] if begins else ["phase"])
    assert dropped == [RunTerminated] * 2
    raise_if_ended()  # the next run of this process is not ended


@pytest.mark.parametrize("error", [None, WorkerLost("gone"), KeyboardInterrupt()])
def test_a_signal_that_was_lost_counts_at_the_latest_at_the_end(error: BaseException | None, dropped: Any) -> None:
    @ending_on_signals()
    def end() -> None:
        Signalled(signal.SIGTERM)
        if error is not None:
            raise error

    before = [signal.getsignal(number) for number in CODES]
    with pytest.raises(RunTerminated) as caught:
        end()
    assert (caught.value.exit_code, caught.value.__cause__, len(dropped)) == (143, error, 1)
    assert [signal.getsignal(number) for number in CODES] == before


def test_without_a_signal_errors_are_as_they_are() -> None:
    for error in (WorkerLost("gone"), KeyboardInterrupt(), RunInterrupted(2, "resume", "checkpoint")):
        with pytest.raises(type(error)) as caught, ending_on_signals():
            raise error
        assert caught.value is error


def test_a_programs_own_handler_of_ctrl_c_is_kept() -> None:
    def own(*_: object) -> None:
        pass

    before = signal.signal(signal.SIGINT, own)
    try:
        with ending_on_signals():
            assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_signal_ends_one_run_of_a_program_that_calls_the_algorithm_itself() -> None:
    checkpoints: Any = SimpleNamespace(_trained={}, _config=SimpleNamespace(on_interrupt=True), _stop=None)

    def training() -> None:
        with Checkpoints.handling_signals(checkpoints):
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(RunTerminated):
        training()
    assert checkpoints._stop == signal.SIGINT
    raise_if_ended()  # the next run of this process is not ended


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES)
def test_a_run_ends_in_the_step_in_which_a_signal_is_lost(
    run_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropped: list[Any], number: signal.Signals
) -> None:
    train, calls = Policy.train, list[int]()

    def signalled(self: Policy, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            Signalled(number)
        return train(self, *args, **kwargs)

    monkeypatch.setattr(Policy, "train", signalled)
    with pytest.raises(RunTerminated) as caught:
        run(run_config("sft", "algorithm.num_steps=4", "checkpoints.on_interrupt=false"))
    assert (caught.value.exit_code, len(calls), len(dropped)) == (CODES[number], 2, 1)
    assert max(row["step"] for row in rows_of(tmp_path / "run")) == 1
    assert not (tmp_path / "run" / "model").exists()

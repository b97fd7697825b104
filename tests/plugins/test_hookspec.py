"""The hooks: their examples run, and are whole plugins; their names fit the kinds of record."""

from __future__ import annotations

import doctest
import types
from pathlib import Path

import pytest

from rlframework.plugins import hookspec as specs
from rlframework.plugins.discovery import new_pluggy, read_plugin
from rlframework.plugins.types import RECORD_TYPES

HOOKS = sorted(name for name in vars(specs) if name.startswith("rlframework_"))
EVENTS = ("run_started", "step_finished", "checkpoint_saved", "run_finished")
OBSERVERS = {f"rlframework_{event}" for event in EVENTS}
ACTING = OBSERVERS | {
    f"rlframework_{hook}"
    for hook in (
        *("commands", "key_hint", "value_hint", "configuration_hint", "observers", "observer_problems"),
        *("run_planned", "plan_elsewhere", "state_layout", "weights_are_staged", "doctor_checks"),
        *("resume_from", "uploads", "agent_endpoint", "teacher_endpoint", "judge"),
    )
}


def run_example(hook: str) -> types.ModuleType:
    """The module that the example in the hook's docstring makes."""
    module = types.ModuleType(f"example_of_{hook}")
    examples = doctest.DocTestParser().get_doctest(getattr(specs, hook).__doc__, module.__dict__, hook, None, None)
    assert examples.examples, f"{hook} has no example"
    failures = []
    result = doctest.DocTestRunner(verbose=False).run(examples, out=failures.append, clear_globs=False)
    assert result.failed == 0, "".join(failures)
    module.__dict__.update(examples.globs)
    return module


def test_there_is_one_hook_for_each_kind_beside_those_that_act():
    assert set(HOOKS) == ACTING | {f"rlframework_{kind}s" for kind in RECORD_TYPES}
    assert len(RECORD_TYPES) == 6


@pytest.mark.parametrize("hook", HOOKS)
def test_the_example_is_a_whole_plugin_for_that_hook(hook):
    module = run_example(hook)
    records, error = read_plugin(module)
    assert error is None
    manager = new_pluggy()
    manager.register(module)
    assert [caller.name for caller in manager.get_hookcallers(module)] == [hook]
    assert [f"rlframework_{record.kind}s" for record in records] == ([] if hook in ACTING else [hook])


def test_the_observer_examples_hear_what_is_told(capsys):
    manager = new_pluggy()
    for hook in OBSERVERS:
        manager.register(run_example(hook))
    run = specs.RunInfo(config=None, output_dir=Path("there"))
    manager.hook.rlframework_run_started(run=run)
    told = {"metrics": {"reward": 1.0, "loss": 2.0}, "samples": [], "timeline": []}
    manager.hook.rlframework_step_finished(run=run, step=3, **told)
    manager.hook.rlframework_checkpoint_saved(run=run, step=4, path=Path("there/step_4"))
    manager.hook.rlframework_run_finished(run=run, metrics={"reward": 1.0})
    assert capsys.readouterr().out.splitlines() == [
        "writing to there",
        "3 ['loss', 'reward']",
        "step 4 is in there/step_4",
        "done: there ['reward']",
    ]

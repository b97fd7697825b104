"""Hooks that act: plugins are called in order, each alone; one that fails or is slow is named, and the rest go on."""

from __future__ import annotations

import doctest
import logging
import time
import types

import pytest

from rlframework.base import logs
from rlframework.base.errors import ConfigError, PluginError, WriteError
from rlframework.plugins import hookspec
from rlframework.plugins.discovery import new_pluggy, read_plugin
from rlframework.plugins.hook_calls import ON_FAILURE, OnFailure
from rlframework.plugins.manager import create_manager
from rlframework.plugins.types import RECORD_TYPES

TEMPLATE = """
    import time
    from rlframework.base.errors import ConfigError, WriteError
    from rlframework.plugins.hookspec import hookimpl

    @hookimpl({options})
    def {hook}():
        {body}
"""
REMEDY = "Reinstall or update bad-tools, or disable it: RLFRAMEWORK_DISABLE_PLUGINS=bad."
EVENTS = ("run_started", "step_finished", "checkpoint_saved", "run_finished")
HOOKS = {name for name in vars(hookspec) if name.startswith("rlframework_")}
OF_RECORDS = {f"rlframework_{kind}s" for kind in RECORD_TYPES}


def code(hook: str, body: str, options: str = "") -> str:
    return TEMPLATE.format(hook=hook, body=body, options=options)


def results(hook: str, manager=None) -> list[tuple[str, object]]:
    """The answers of the plugins by name; an argument that a hook needs is its own name."""
    manager = manager or create_manager()
    arguments = {name: name for name in getattr(manager.hook, hook).spec.argnames}
    return [(plugin.name, answer) for plugin, answer in manager.call(hook, lambda call: call(**arguments))]


def test_each_hook_that_acts_says_what_a_failure_does():
    assert OF_RECORDS < HOOKS
    assert set(ON_FAILURE) == HOOKS - OF_RECORDS - {f"rlframework_{event}" for event in EVENTS}


@pytest.mark.parametrize("hook", ON_FAILURE)
@pytest.mark.parametrize("body", ["raise LookupError('oh')", "raise SystemExit(3)"])
def test_a_bug_in_a_hook_stops_or_is_a_warning_and_names_the_plugin(install, caplog, hook, body):
    install("bad-tools", "bad", code(hook, body, "tryfirst=True"))
    install("acme-tools", "acme", code(hook, "return ['fine']"))
    problem = f"{hook} of bad-tools 1.0 failed: {'LookupError: oh' if 'Lookup' in body else 'SystemExit: 3'}. {REMEDY}"
    if ON_FAILURE[hook] is OnFailure.STOP:
        with pytest.raises(PluginError) as caught:
            results(hook)
        assert str(caught.value) == problem
        assert not isinstance(caught.value.__cause__, PluginError)
        return
    manager = create_manager()
    for _ in range(2):
        assert results(hook, manager) == [("acme", ["fine"])]
    assert caplog.messages == [f"warning: {problem}"], "once"


@pytest.mark.parametrize("hook", ON_FAILURE)
@pytest.mark.parametrize("error", [ConfigError, WriteError])
def test_errors_that_a_hook_raises_on_purpose(install, hook, error):
    install("bad-tools", "bad", code(hook, f"raise {error.__name__}('say this')"))
    raised = {OnFailure.STOP: True, OnFailure.USER_ERRORS_STOP: error is ConfigError, OnFailure.GO_ON: False}
    if raised[ON_FAILURE[hook]]:
        with pytest.raises(error, match=r"^say this$"):
            results(hook)
    else:
        assert results(hook) == []


def test_an_answer_that_cannot_be_used_is_the_plugins_fault(install):
    install("bad-tools", "bad", code("rlframework_uploads", "return 7"))
    with pytest.raises(PluginError, match=r"rlframework_uploads of bad-tools 1.0 failed: TypeError: .*'int'"):
        create_manager().call_first("rlframework_uploads", lambda call: len(call(config=None)))


def test_plugins_are_called_in_the_order_they_ask_for_and_the_first_answer_counts(install):
    for name, options in (("last", "trylast=True"), ("plain", ""), ("first", "tryfirst=True")):
        install(f"{name}-tools", name, code("rlframework_agent_endpoint", f"return '{name}'", options))
    install("none-tools", "none", code("rlframework_agent_endpoint", "return None", "tryfirst=True"))
    assert [name for name, _ in results("rlframework_agent_endpoint")] == ["first", "plain", "last"]
    assert create_manager().call_first("rlframework_agent_endpoint", lambda call: call()) == "first"


def test_a_wrapper_is_refused(install, caplog):
    install("bad-tools", "bad", code("rlframework_observers", "yield", "wrapper=True"))
    assert results("rlframework_observers") == []
    assert "rlframework_observers of bad-tools 1.0 failed: hooks that act cannot be wrapped." in caplog.text


@pytest.mark.parametrize(
    ("hook", "level"), [("rlframework_run_planned", logging.WARNING), ("rlframework_resume_from", logging.INFO)]
)
def test_a_hook_that_blocks_is_named_while_it_does(install, caplog, monkeypatch, hook, level):
    install("slow-tools", "slow", code(hook, "time.sleep(0.2); return ['late']"))
    manager = create_manager()
    monkeypatch.setattr(logs, "SLOW_SECONDS", 0.05)
    with caplog.at_level(logging.INFO):
        assert results(hook, manager) == [("slow", ["late"])]
    [record] = caplog.records
    assert record.getMessage() == (
        f"still waiting for {hook} of slow-tools 1.0 after 0.05 s; the program goes on when it is done. "
        "To do without it: RLFRAMEWORK_DISABLE_PLUGINS=slow"
    )
    assert record.levelno == level


def test_an_import_that_blocks_is_named_and_a_quick_one_is_not(install, caplog, monkeypatch):
    monkeypatch.setattr(logs, "SLOW_SECONDS", 0.1)
    install("slow-tools", "slow", "import time; time.sleep(0.3)")
    install("acme-engine", "acme")
    create_manager()
    time.sleep(0.15)
    [message] = caplog.messages
    assert message.startswith("still waiting for the import of slow of slow-tools 1.0 after")


def test_a_plugin_that_is_broken_is_told_where_its_hooks_would_have_acted(install, caplog):
    install("bad-tools", "bad", "raise ImportError('libbad.so is missing.')")
    manager = create_manager()
    manager.warn_of_broken()
    reason = "bad-tools 1.0 is broken: ImportError: libbad.so is missing."
    assert caplog.messages == [f"warning: the plugin 'bad' of {reason} {REMEDY}"]
    assert manager.how_to_get("storage").endswith(f"plugins/storage. bad of {reason}")


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_the_example_of_a_hook_is_a_whole_plugin(hook):
    module = types.ModuleType(f"example_of_{hook}")
    examples = doctest.DocTestParser().get_doctest(getattr(hookspec, hook).__doc__, module.__dict__, hook, None, None)
    assert examples.examples
    failures = []
    doctest.DocTestRunner(verbose=False).run(examples, out=failures.append, clear_globs=False)
    assert failures == []
    module.__dict__.update(examples.globs)
    records, error = read_plugin(module)
    assert error is None
    pluggy = new_pluggy()
    pluggy.register(module)
    assert [caller.name for caller in pluggy.get_hookcallers(module)] == [hook]
    assert {f"rlframework_{record.kind}s" for record in records} == {hook} & OF_RECORDS

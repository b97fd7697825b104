"""Checks of plugins in the doctor: shown with its own, and a plugin that fails is named."""

from __future__ import annotations

import logging
import sys
import time
import types

import pytest

from rlframework.base import logs
from rlframework.plugins.hookspec import DoctorCheck, DoctorFinding, hookimpl
from rlframework.plugins.manager import create_manager
from rlframework_tools.doctor import examination
from rlframework_tools.doctor.checks import Check, Context, ok
from rlframework_tools.doctor.examination import checks_of_plugins, examine

DISABLE = "disable it: RLFRAMEWORK_DISABLE_PLUGINS=fake_doctor"


@pytest.fixture
def findings(monkeypatch):
    """`findings(hook, config)`: those of an examination whose only check beside those of the plugin is `machine`."""

    def look(hook, config=None, source=None):
        module = types.ModuleType("fake_doctor")
        module.rlframework_doctor_checks = hookimpl(hook, specname="rlframework_doctor_checks")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        context = Context()
        context.config, context.source = config, source
        context.manager = create_manager([module.__name__])
        monkeypatch.setattr(examination, "Context", lambda *_, **__: context)
        monkeypatch.setattr(examination, "RATES", Check("run", "rates", lambda _: ()))
        own = (Check("machine", "own", lambda _: [ok("fine")]), Check("run", "own", lambda _: [ok("starts")]))
        monkeypatch.setattr(examination, "CHECKS", own)
        return [(one.topic, one.name, str(one.level), one.text, one.remedy) for one in examine(source).findings]

    return look


def told(level="ok", text="there", **more):
    return lambda config: [DoctorFinding(level, text, **more)]


def test_findings_stand_with_those_of_their_topic_and_new_topics_come_last(findings):
    checks = [
        DoctorCheck("licences", "acme", told("broken", "none", remedy="buy one")),
        DoctorCheck("machine", "card", told()),
        DoctorCheck("run", "size", lambda config: [DoctorFinding("note", f"of {config.generation.name}")]),
    ]
    acme = ("licences", "acme (fake_doctor)", "broken", "none", "buy one")
    machine = [("machine", "own", "ok", "fine", ""), ("machine", "card (fake_doctor)", "ok", "there", "")]
    assert findings(lambda: checks) == [*machine, acme]
    run = [("run", "own", "ok", "starts", ""), ("run", "size (fake_doctor)", "note", "of none", "")]
    config = types.SimpleNamespace(generation=types.SimpleNamespace(name="none"))
    assert findings(lambda: checks, config, "run.yaml") == [*machine, *run, acme]
    assert findings(lambda: checks, None, "run.yaml") == [*machine, run[0], acme], "it did not load"


def raises(*_):
    raise LookupError("oh")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (raises, "could not be checked: LookupError: oh"),
        (lambda config: ["fine"], "could not be checked: TypeError: 'fine' is no DoctorFinding"),
        (told("splendid"), "could not be checked: ValueError: 'splendid' is not a valid Level"),
    ],
)
def test_a_check_that_fails_is_a_finding_that_names_its_plugin(findings, function, text):
    own, finding = findings(lambda: [DoctorCheck("machine", "card", function)])
    assert own[3] == "fine"
    assert finding[:4] == ("machine", "card (fake_doctor)", "unknown", text)
    assert finding[4].startswith("The check is of module fake_doctor unversioned.")
    assert DISABLE in finding[4]


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (raises, "LookupError: oh"),
        (lambda: ["no"], "TypeError: it returned 'no'; it must return a list of"),
    ],
)
def test_a_hook_that_fails_is_a_finding(findings, hook, text):
    own, finding = findings(lambda: hook())
    assert own[3] == "fine"
    assert finding[:3] == ("plugins", "checks", "unknown")
    assert f"rlframework_doctor_checks of module fake_doctor unversioned failed: {text}" in finding[3]
    assert DISABLE in finding[3]


def test_a_check_that_blocks_is_named(findings, caplog, monkeypatch):
    monkeypatch.setattr(logs, "SLOW_SECONDS", 0.05)

    def slow(config):
        time.sleep(0.2)
        return [DoctorFinding("ok", "late")]

    with caplog.at_level(logging.WARNING):
        assert findings(lambda: [DoctorCheck("machine", "card", slow)])[1][3] == "late"
    assert any("waiting for the check card (fake_doctor) of module fake_doctor" in text for text in caplog.messages)


def test_a_manager_that_cannot_be_created_has_no_checks(monkeypatch):
    monkeypatch.setenv("RLFRAMEWORK_DISABLE_PLUGINS", "nobody")
    assert checks_of_plugins(Context()) == []

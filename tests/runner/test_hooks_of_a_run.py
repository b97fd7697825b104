"""Hooks that a run calls before it starts: a plugin that fails is named, and the run goes on or not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rlframework.base.errors import ConfigError, PluginError
from rlframework.plugins.discovery import Plugin
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.manager import PluginManager
from rlframework.runner import launch

SECTION = SimpleNamespace(upload="s3://bucket", resume_uploaded=True)
CONFIG = SimpleNamespace(checkpoints=SECTION)


def manager_of(**hooks) -> PluginManager:
    """A manager of the plugin `acme` of acme-tools 1.0 with the functions `hooks`."""
    module = SimpleNamespace()
    for name, hook in hooks.items():
        setattr(module, f"rlframework_{name}", hookimpl(hook, specname=f"rlframework_{name}"))
    plugin = Plugin("acme", "acme-tools", "1.0", "", lambda: module)
    plugin.load()
    assert plugin.error is None or not hooks
    return PluginManager([plugin], frozenset())


def raising(error):
    def hook():
        raise error

    return hook


def test_a_bug_in_a_plugin_that_hears_of_the_plan_is_a_warning_and_a_user_error_is_not(monkeypatch, caplog):
    monkeypatch.setattr(launch, "backend_record", lambda config, manager: None)
    parts = SimpleNamespace(config=None)
    launch.run_planned(parts, manager_of(run_planned=raising(LookupError("oh"))), dry_run=True)
    [message] = caplog.messages
    assert message.startswith("warning: rlframework_run_planned of acme-tools 1.0 failed: LookupError: oh. Reinstall ")
    with pytest.raises(ConfigError, match=r"^too big$"):
        launch.run_planned(parts, manager_of(run_planned=raising(ConfigError("too big"))), dry_run=True)


def resumed_from(manager, named=None, *, overwrite=False):
    return launch._checkpoint(CONFIG, manager, named, overwrite)


def test_a_run_continues_from_the_checkpoint_that_a_plugin_finds_unless_one_is_named():
    manager = manager_of(resume_from=lambda: Path("found"), uploads=lambda: None)
    assert resumed_from(manager) == Path("found")
    assert resumed_from(manager, Path("named")) == Path("named")
    assert resumed_from(manager_of(resume_from=lambda: None, uploads=lambda: None)) is None


@pytest.mark.parametrize(("hook", "reason"), [(raising(KeyError("k")), "KeyError: 'k'"), (lambda: 7, "TypeError: ")])
def test_a_plugin_that_cannot_say_where_a_run_continues_prevents_it(hook, reason):
    with pytest.raises(PluginError) as caught:
        resumed_from(manager_of(resume_from=hook, uploads=lambda: None))
    assert str(caught.value).startswith(f"rlframework_resume_from of acme-tools 1.0 failed: {reason}")
    assert "RLFRAMEWORK_DISABLE_PLUGINS=acme" in str(caught.value)


def test_uploads_without_a_plugin_name_the_command_and_the_plugin_that_is_broken():
    with pytest.raises(PluginError) as caught:
        resumed_from(manager_of())
    message = str(caught.value)
    assert message.startswith("checkpoints.upload needs a plugin that uploads: pip install -e ")
    assert "acme of acme-tools 1.0 is broken: it implements no hook of rlframework" in message

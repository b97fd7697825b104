"""The manager: finding, choosing, and its errors. The plugins are made up; see conftest.py."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from typing import get_args

import pytest

import rlframework
from rlframework.base.errors import PluginError
from rlframework.config.algorithm_presets import AlgorithmName
from rlframework.plugins import discovery
from rlframework.plugins.discovery import install_command
from rlframework.plugins.manager import create_manager
from rlframework.plugins.types import EnvironmentRecord, PolicyWorkerRecord

TWO_RECORDS = """
    from rlframework.plugins.hookspec import hookimpl
    from rlframework.plugins.types import PolicyWorkerRecord

    @hookimpl
    def rlframework_policy_workers():
        return [PolicyWorkerRecord("one", "nowhere:One", 1), PolicyWorkerRecord("two", "nowhere:Two", 1)]
"""
LISTENER = """
    from rlframework.plugins.hookspec import hookimpl

    heard = []

    @hookimpl
    def rlframework_run_finished(metrics):
        heard.append(metrics)
"""


def rows(manager, **wanted):
    return [row for row in manager.listing() if all(getattr(row, key) == value for key, value in wanted.items())]


def choose_error(manager, kind, name) -> str:
    with pytest.raises(PluginError) as caught:
        manager.select(kind, name)
    return str(caught.value)


def test_cores_own_parts_come_through_the_same_hooks():
    manager = create_manager()
    assert {kind: set(manager.registered(kind)) for kind in ("worker_group", "generation_engine", "environment")} == {
        "worker_group": {"inline", "processes"},
        "generation_engine": set(),
        "environment": {"addition", "dataset", "gsm8k", "tools"},
    }
    assert set(manager.registered("algorithm")) == {"sft", "ppo", *get_args(AlgorithmName)}
    assert set(manager.registered("data_processor")) == {"microbatches"}
    chosen = manager.select("worker_group", "inline")
    assert (chosen.distribution, chosen.plugin) == ("rlframework-core", "core")
    assert chosen.record.target == "rlframework.workers.dispatch:InlineWorkerGroup"


def test_core_has_a_version_without_being_installed(monkeypatch):
    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(discovery.metadata, "version", not_installed)
    assert create_manager().select("worker_group", "processes").version == rlframework.__version__


def test_an_installed_plugin_is_found_by_its_entry_point(install):
    module = install("acme-engine", "acme", version="3.1")
    manager = create_manager()
    chosen = manager.select("policy_worker", "acme")
    assert (chosen.distribution, chosen.version, chosen.plugin) == ("acme-engine", "3.1", "acme")
    assert manager.load(chosen.record) is sys.modules[module].Worker
    assert manager.registered("policy_worker") == {"acme": chosen}


def test_a_module_in_the_current_directory_is_found_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "fake_here.py").write_text(
        "from rlframework.plugins.hookspec import hookimpl\n"
        "from rlframework.plugins.types import EnvironmentRecord\n"
        "__version__ = '0.7'\n"
        "@hookimpl\n"
        "def rlframework_environments():\n"
        "    return [EnvironmentRecord('here', 'fake_here_worker:Environment', 1)]\n"
    )
    (tmp_path / "fake_here_worker.py").write_text("class Environment: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    importlib.invalidate_caches()
    manager = create_manager(["fake_here"])
    chosen = manager.select("environment", "here")
    assert (chosen.distribution, chosen.version, chosen.plugin) == ("module fake_here", "0.7", "fake_here")
    assert manager.load(chosen.record).__name__ == "Environment"
    assert sys.path[-1] == str(tmp_path)


def test_a_module_that_has_an_entry_point_too_is_registered_once(install):
    module = install("acme-engine", "acme")
    manager = create_manager([module, module])
    assert manager.select("policy_worker", "acme").plugin == "acme"
    assert len(rows(manager, kind="policy_worker")) == 1


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_engine", "ModuleNotFoundError: No module named 'no_such_engine'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def broken(:", "SyntaxError: invalid syntax"),
    ],
)
def test_a_broken_import_is_told_when_it_is_chosen_and_the_others_go_on(install, code, reason):
    install("acme-engine", "acme", code=code, version="2.0")
    install("fine-engine", "fine")
    manager = create_manager()
    assert manager.select("policy_worker", "fine").distribution == "fine-engine"
    with pytest.raises(PluginError) as caught:
        manager.select("policy_worker", "acme")
    assert type(caught.value.__cause__).__name__ == reason.partition(":")[0]
    assert str(caught.value).startswith(f"policy.backend: the plugin 'acme' of acme-engine 2.0 is broken: {reason}")
    [row] = rows(manager, name="acme")
    assert (row.status, row.kind) == ("broken", None)
    assert row.reason.startswith(reason)


def test_records_of_a_broken_plugin_are_refused_by_their_own_names(install):
    code = TWO_RECORDS.replace('"nowhere:Two", 1', '"nowhere:Two", 9')
    install("acme-engine", "acme", code=code, version="2.0")
    manager = create_manager()
    for name in ("one", "two", "acme"):
        message = choose_error(manager, "policy_worker", name)
        assert "acme-engine 2.0 is broken" in message
        assert "'two' is written for version 9 of the plugin API" in message
    assert {row.name for row in rows(manager, status="broken")} == {"one", "two"}


def test_an_unknown_name_gets_the_nearest_and_what_is_installed(install):
    install("acme-engine", "acme", version="2.0")
    install("sick-engine", "sick", code="1 / 0", version="4.0")
    message = choose_error(create_manager(), "policy_worker", "acne")
    assert message.startswith("policy.backend: there is no backend 'acne'. Did you mean 'acme'?")
    assert "Installed: acme (acme-engine 2.0)." in message
    assert "sick of sick-engine 4.0 is broken: ZeroDivisionError: division by zero." in message
    assert "`rlframework plugins` lists the plugins that are found" in message
    message = choose_error(create_manager(), "algorithm", "grpoo")
    assert "Installed: sft, grpo, dr_grpo, " in message
    assert message.count("(rlframework-core ") == 1


@pytest.mark.parametrize(
    ("name", "meant"), [("dtensor", "dtensor"), ("megatron", "megatron"), ("deepsped", "deepspeed")]
)
def test_our_own_backend_that_is_not_installed_says_how_to_install_it(name, meant):
    message = choose_error(create_manager(), "policy_worker", name)
    assert "Installed: none." in message
    assert ("Did you mean 'deepspeed'?" in message) == (name != meant)
    command = install_command(meant)
    assert f"To install {meant}: {command}." in message


def test_two_plugins_of_one_name_blame_both(install):
    install("acme-engine", "acme", version="2.0")
    install("acme-fork", "fork", name="acme", version="0.3")
    manager = create_manager()
    message = choose_error(manager, "policy_worker", "acme")
    assert "2 plugins register a policy_worker 'acme': acme-engine 2.0 and acme-fork 0.3." in message
    assert {row.status for row in rows(manager, name="acme")} == {"broken"}
    assert "acme" not in manager.registered("policy_worker")
    alone = create_manager(disabled=["acme-fork"])
    assert alone.select("policy_worker", "acme").distribution == "acme-engine"


def test_two_entry_points_of_one_name_are_two_plugins(install):
    install("acme-engine", "acme", version="2.0")
    install("acme-fork", "acme", name="other", version="0.3")
    manager = create_manager()
    assert manager.fingerprint().items() >= {
        ("acme", ("acme-engine", "2.0")),
        ("acme (acme-fork)", ("acme-fork", "0.3")),
    }
    assert manager.select("policy_worker", "other").version == "0.3"


@pytest.mark.parametrize("requires", [[], ["rlframework-core==99.0"]], ids=["broken", "of another version"])
def test_a_disabled_plugin_is_not_even_imported(install, monkeypatch, requires):
    module = install("acme-engine", "acme", code="raise AssertionError('imported')", version="2.0", requires=requires)
    monkeypatch.setenv("RLFRAMEWORK_DISABLE_PLUGINS", " acme ,,")
    manager = create_manager()
    assert module not in sys.modules
    message = choose_error(manager, "policy_worker", "acme")
    assert "'acme' (acme-engine 2.0) is disabled by RLFRAMEWORK_DISABLE_PLUGINS" in message
    assert [row.status for row in rows(manager, name="acme")] == ["disabled"]
    assert "acme" not in manager.fingerprint()
    assert "acme of acme-engine 2.0 is disabled" in choose_error(manager, "policy_worker", "something")


def test_one_record_of_a_plugin_can_be_disabled(install):
    install("acme-engine", "acme", code=TWO_RECORDS)
    manager = create_manager(disabled=["two"])
    assert set(manager.registered("policy_worker")) == {"one"}
    assert "'two' (acme-engine 1.0) is disabled" in choose_error(manager, "policy_worker", "two")
    statuses = {row.name: row.status for row in rows(manager, distribution="acme-engine")}
    assert statuses == {"one": "active", "two": "disabled"}


def test_a_word_to_disable_that_nobody_answers_to_is_an_error(monkeypatch):
    monkeypatch.setenv("RLFRAMEWORK_DISABLE_PLUGINS", "inlime")
    with pytest.raises(PluginError, match=r"there is no plugin 'inlime'\. Did you mean 'inline'") as caught:
        create_manager()
    assert "gsm8k" in str(caught.value)


def test_observers_hear_only_while_their_plugin_is_active(install):
    module = install("acme-listener", "listener", code=LISTENER)
    create_manager(disabled=["listener"]).hook.rlframework_run_finished(run=None, metrics={"a": 1.0})
    manager = create_manager()
    manager.hook.rlframework_run_finished(run=None, metrics={"b": 2.0})
    assert sys.modules[module].heard == [{"b": 2.0}]
    [row] = rows(manager, name="listener")
    assert (row.kind, row.api_version, row.status) == (None, None, "active")


def test_loading_names_the_distribution_when_the_class_cannot_be_imported(install):
    code = TWO_RECORDS.replace("nowhere:Two", "json:NoSuchClass").replace("nowhere:One", "json:dumps")
    install("acme-engine", "acme", code=code, version="2.0")
    manager = create_manager()
    with pytest.raises(PluginError, match=r"'two' of acme-engine 2.0 is broken: module 'json' has no 'NoSuchClass'"):
        manager.load(manager.select("policy_worker", "two").record)
    with pytest.raises(PluginError, match=r"json:dumps, of acme-engine 2.0, is not a class"):
        manager.load(manager.select("policy_worker", "one").record)
    plain = EnvironmentRecord("plain", "json:JSONDecoder", 1)
    assert manager.load(plain) is importlib.import_module("json").JSONDecoder
    with pytest.raises(PluginError, match="a plugin that this manager does not know"):
        manager.load(PolicyWorkerRecord("stray", "no_such_module:Class", 1))


def test_equal_fingerprints_pass_and_each_difference_is_named(install):
    install("acme-engine", "acme", version="2.0")
    install("sick-engine", "sick", code="1 / 0", version="4.0")
    manager = create_manager()
    ours = manager.fingerprint()
    assert set(ours) == {"core", "acme"}
    manager.compare_fingerprint({name: list(entry) for name, entry in ours.items()})
    theirs = {**ours, "acme": ("acme-engine", "2.1"), "sick": ("sick-engine", "4.0"), "gone": ("gone-engine", "1.0")}
    del theirs["core"]
    with pytest.raises(PluginError) as caught:
        manager.compare_fingerprint(theirs)
    message = str(caught.value)
    assert "acme: the driver has acme-engine 2.1, this process has acme-engine 2.0;" in message
    assert "gone: the driver has gone-engine 1.0, this process has none;" in message
    assert f"core: the driver has none, this process has rlframework-core {ours['core'][1]};" in message
    assert (
        "sick: the driver has sick-engine 4.0, this process has it broken (sick-engine 4.0: ZeroDivisionError"
        in message
    )


CORE = metadata.version("rlframework-core")


def fault_of(name: str) -> str:
    """The error of the backend `name`; core's own parts work."""
    manager = create_manager()
    assert manager.select("worker_group", "inline").distribution == "rlframework-core"
    with pytest.raises(PluginError) as caught:
        manager.select("policy_worker", name)
    return str(caught.value)


@pytest.mark.parametrize(
    "requirement", ["rlframework-core==99.0", "RLFramework_Core[ray]<0.1", "rlframework.core (>=99)"]
)
def test_a_satellite_of_another_version_is_not_imported_and_says_what_to_install(install, requirement):
    module = install("acme-engine", "acme", version="99.0", requires=["torch", requirement])
    message = fault_of("acme")
    assert module not in sys.modules
    assert message.startswith("policy.backend: the plugin 'acme' of acme-engine 99.0 is broken: ")
    assert f"but rlframework-core {CORE} is installed" in message
    assert "pip install --upgrade rlframework-core acme-engine." in message
    assert "or disable it: RLFRAMEWORK_DISABLE_PLUGINS=acme." in message


@pytest.mark.parametrize(
    "requirement",
    [f"rlframework-core=={CORE}", "rlframework-core[all]>=0.0.1,<9", "rlframework-core==99.0; extra == 'new'",
     "rlframework-core==99.0; python_version < '3'", "rlframework-core-extras==99.0"],
)  # fmt: skip
def test_requirements_that_are_met_or_of_something_else_are_no_fault(install, requirement):
    install("acme-engine", "acme", requires=[requirement])
    assert create_manager().select("policy_worker", "acme").version == "1.0"


def test_a_requirement_that_cannot_be_read_breaks_its_plugin_alone(install):
    install("acme-engine", "acme", requires=["rlframework-core >>= 3"])
    assert "acme-engine 1.0 requires 'rlframework-core >>= 3', which is no requirement;" in fault_of("acme")


def test_a_distribution_that_is_installed_twice_says_which_versions_and_where(install, tmp_path):
    install("acme-engine", "acme", version="2.0")
    module = install("acme-engine", "acme", version="3.0")
    message = fault_of("acme")
    assert module not in sys.modules
    assert f"acme-engine is installed 2 times in {(tmp_path / 'site').resolve()}: 2.0 and 3.0;" in message
    assert "run `pip uninstall acme-engine` until none is left, and install one." in message
    [row] = [row for row in create_manager().listing() if row.distribution == "acme-engine"]
    assert row.status == "broken"


def test_a_folder_that_comes_first_hides_a_later_one_and_may_be_named_twice(install, tmp_path, monkeypatch):
    install("acme-engine", "acme", version="2.0")
    later = tmp_path / "later" / "acme_engine-1.0.dist-info"
    later.mkdir(parents=True)
    (later / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-engine\nVersion: 1.0\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(later.parent), sys.path[0]])
    assert create_manager().select("policy_worker", "acme").version == "2.0"

"""Import paths, and mistakes in one plugin that pluggy accepts without a word: each is found, and says what to do."""

from __future__ import annotations

import collections
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from rlframework.base.errors import PluginError
from rlframework.config.sections import EnvironmentConfig
from rlframework.plugins import discovery
from rlframework.plugins.discovery import load_target, read_plugin
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import (
    API_VERSION,
    AlgorithmRecord,
    Capability,
    EnvironmentRecord,
    GenerationEngineRecord,
    PolicyWorkerRecord,
    Record,
)

GOOD = PolicyWorkerRecord("good", "package.module:Class", 1, capabilities=frozenset({Capability.LORA}))


def plugin_returning(returned, hook="rlframework_policy_workers"):
    def implementation():
        return returned

    return SimpleNamespace(**{hook: hookimpl(implementation, specname=hook)})


def fault_of(plugin) -> str:
    _, error = read_plugin(plugin)
    assert isinstance(error, PluginError), error
    return str(error)


@pytest.mark.parametrize("returned", [[GOOD], (GOOD,), {GOOD}, iter([GOOD])])
def test_any_iterable_of_records_is_read(returned):
    records, error = read_plugin(plugin_returning(returned))
    assert (records, error) == ([GOOD], None)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (GOOD, "returned PolicyWorkerRecord; it must return a list of PolicyWorkerRecord"),
        (7, "returned int; it must return a list of PolicyWorkerRecord"),
        ("good", "returned str; it must return a list of PolicyWorkerRecord"),
        (
            [GOOD, EnvironmentRecord("e", "m:C", 1)],
            "a list that contains a EnvironmentRecord; all items must be PolicyWorkerRecord",
        ),
        ([{"name": "good"}], "a list that contains a dict; all items must be PolicyWorkerRecord"),
    ],
)
def test_what_is_not_a_list_of_records_of_that_kind_is_named(returned, message):
    assert message in fault_of(plugin_returning(returned))


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({}, "implements no hook"),
        (
            {"rlframework_policy_worker": hookimpl(lambda: [GOOD], specname="rlframework_policy_worker")},
            "unknown hook 'rlframework_policy_worker'. Did you mean 'rlframework_policy_workers'?",
        ),
        (
            {"rlframework_policy_workers": lambda: [GOOD]},
            "rlframework_policy_workers is not marked as a hook; decorate it with @hookimpl",
        ),
        (
            {"rlframework_step_finished": hookimpl(lambda step, metrics=None: 0, specname="rlframework_step_finished")},
            "rlframework_step_finished has default values for metrics",
        ),
    ],
)
def test_hooks_that_would_never_be_called_as_meant(hooks, message):
    assert message in fault_of(SimpleNamespace(**hooks))


def test_an_unknown_argument_is_found_and_an_optional_hook_may_be_unknown():
    hook = hookimpl(lambda step, model: None, specname="rlframework_step_finished")
    assert "model" in str(read_plugin(SimpleNamespace(rlframework_step_finished=hook))[1])
    hook = hookimpl(lambda: None, specname="rlframework_of_the_future", optionalhook=True)
    assert read_plugin(SimpleNamespace(rlframework_of_the_future=hook)) == ([], None)


def test_errors_of_a_hook_are_kept_as_they_are():
    def raises():
        raise ZeroDivisionError("by zero")

    hook = hookimpl(raises, specname="rlframework_policy_workers")
    assert isinstance(read_plugin(SimpleNamespace(rlframework_policy_workers=hook))[1], ZeroDivisionError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"api_version": API_VERSION + 1},
            f"'good' is written for version {API_VERSION + 1} of the plugin API, but this rlframework-core has version",
        ),
        ({"name": "two words"}, "'two words' is invalid: use letters"),
        ({"name": "optimizer"}, "'optimizer' is a key of the section `policy`"),
        ({"target": "package.module"}, "'package.module' of 'good' must have the form 'package.module:Class'"),
        ({"config_model": BaseModel}, "must be a class derived from rlframework.config.base.Section"),
        (
            {"capabilities": frozenset({"flight"})},
            "'good' declares the unknown capability 'flight'; capabilities of the kind policy_worker: activation_",
        ),
    ],
)
def test_a_record_that_cannot_work_is_refused(changes, message):
    plugin = plugin_returning([replace(GOOD, **changes)])
    assert message in fault_of(plugin)
    assert [record.name for record in read_plugin(plugin)[0]] == [changes.get("name", "good")]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            GenerationEngineRecord("mine", "m:C", 2, capabilities=frozenset({Capability.LORA})),
            "the capability lora, one of policy_worker; capabilities of the kind generation_engine: ",
        ),
        (
            EnvironmentRecord("mine", "m:C", 1, capabilities=frozenset({Capability.MULTIMODAL, "acme:x"})),
            "one of policy_worker and generation_engine; capabilities of the kind environment: episodes",
        ),
        (
            AlgorithmRecord("mine", "m:C", 1, capabilities=frozenset({"acme:a:b"})),
            "unknown capability 'acme:a:b'; capabilities of the kind algorithm: none. Write one of your own with",
        ),
    ],
)
def test_a_capability_of_another_kind_or_without_a_prefix_is_refused(record, message):
    assert message in fault_of(plugin_returning([record], f"rlframework_{record.kind}s"))


@pytest.mark.parametrize("kind", Record.__subclasses__(), ids=lambda kind: kind.kind)
def test_a_plugin_declares_capabilities_of_its_own_on_any_kind_of_record(kind):
    own = frozenset({"acme:sparse_attention", *kind.supported_capabilities})
    record = kind("mine", "m:C", kind.supported_api, capabilities=own)
    assert read_plugin(plugin_returning([record], f"rlframework_{kind.kind}s")) == ([record], None)


def test_every_capability_is_one_of_a_kind():
    assert {one for kind in Record.__subclasses__() for one in kind.supported_capabilities} == set(Capability)


@pytest.mark.parametrize(("version", "hint"), [(1, " (see the page: Move a generation engine to version 2)"), (3, "")])
def test_generation_engines_have_a_version_of_their_own(version, hint):
    old = GenerationEngineRecord("mine", "m:C", version)
    plugin = plugin_returning([old], "rlframework_generation_engines")
    assert fault_of(plugin) == (
        f"its generation_engine 'mine' is written for version {version} of the plugin API, but this rlframework-core "
        f"has version 2 for that kind; install compatible versions of the two{hint}"
    )
    assert read_plugin(plugin_returning([replace(old, api_version=2)], "rlframework_generation_engines"))[1] is None


@pytest.mark.parametrize("kind", Record.__subclasses__(), ids=lambda kind: kind.kind)
def test_a_plugin_of_version_1_loads_or_is_told_what_to_do(kind):
    fault = read_plugin(plugin_returning([kind("mine", "m:C", 1)], f"rlframework_{kind.kind}s"))[1]
    if kind.supported_api == 1:
        assert fault is None
        return
    title = re.search(r"\(see the page: (.+)\)$", str(fault))[1]
    pages = (Path(__file__).parents[2] / "docs" / "moving").glob("*.md")
    assert f"# {title}" in {page.read_text(encoding="utf-8").partition("\n")[0] for page in pages}


def test_the_model_of_a_section_must_have_the_keys_that_the_kind_shares():
    class Right(EnvironmentConfig):
        width: int = 1

    class Wrong(BaseModel):
        width: int = 1

    hook = "rlframework_environments"
    record = EnvironmentRecord("maze", "m:C", 1, config_model=Right)
    assert read_plugin(plugin_returning([record], hook)) == ([record], None)
    message = fault_of(plugin_returning([replace(record, config_model=Wrong)], hook))
    assert "must be a class derived from rlframework.config.sections.EnvironmentConfig" in message


def test_an_import_path_is_a_module_and_a_name_in_it():
    assert load_target("collections:OrderedDict") is collections.OrderedDict
    assert load_target("collections:OrderedDict.fromkeys") == collections.OrderedDict.fromkeys
    with pytest.raises(PluginError, match="module 'collections' has no 'Ordered'; check the target of the plugin"):
        load_target("collections:Ordered")
    with pytest.raises(PluginError, match="'collections' is not an import path: write module:Name"):
        load_target("collections")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_here"):
        load_target("no_such_module_here:Name")


@pytest.mark.parametrize(
    ("extra", "in_the_clone", "elsewhere"),
    [
        ("ray", "-e plugins/ray", "-e {root}/plugins/ray"),
        ("mcp", "-e '.[mcp]' -e plugins/environments", "-e '{root}[mcp]' -e {root}/plugins/environments"),
    ],
)
def test_in_a_clone_the_distributions_of_an_extra_are_installed_from_it(
    tmp_path, monkeypatch, extra, in_the_clone, elsewhere
):
    root = Path(discovery.rlframework.__file__).parents[1]
    monkeypatch.chdir(root)
    assert discovery.install_command(extra) == f"pip install {in_the_clone}"
    monkeypatch.chdir(tmp_path)
    assert discovery.install_command(extra) == f"pip install {elsewhere.format(root=root)}"


def test_without_a_clone_an_extra_is_installed_from_wheels(tmp_path, monkeypatch):
    monkeypatch.setattr(discovery.rlframework, "__file__", str(tmp_path / "rlframework" / "__init__.py"))
    wheels = "(from the wheels of a release: with --find-links WHEELS)"
    assert discovery.install_command("ray") == f"pip install 'rlframework-core[ray]' {wheels}"

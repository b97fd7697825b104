"""Import paths, and mistakes in one plugin that pluggy accepts without a word: each is found, and says what to do."""

from __future__ import annotations

import collections
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from pydantic import BaseModel

from rlframework.base.errors import ConfigError, PluginError
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
from rlframework.plugins.user_defined import load_agent

GOOD = PolicyWorkerRecord("good", "package.module:Class", 1, capabilities=frozenset({Capability.LORA}))


def plugin_returning(returned, hook="rlframework_policy_workers"):
    def implementation():
        return returned

    return SimpleNamespace(**{hook: hookimpl(implementation, specname=hook)})


def fault_of(plugin) -> str:
    _, error = read_plugin(plugin)
    assert isinstance(error, PluginError), error
    return str(error)


def of_workers(implementation, **options):
    return {"rlframework_policy_workers": hookimpl(implementation, specname="rlframework_policy_workers", **options)}


@pytest.mark.parametrize("returned", [[GOOD], (GOOD,), {GOOD}, iter([GOOD])])
def test_any_iterable_of_records_is_read(returned):
    assert read_plugin(plugin_returning(returned)) == ([GOOD], None)


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        (of_workers(lambda: GOOD), "returned PolicyWorkerRecord; it must return a list of PolicyWorkerRecord"),
        (of_workers(lambda: 7), "returned int; it must return a list of PolicyWorkerRecord"),
        (of_workers(lambda: "good"), "returned str; it must return a list of PolicyWorkerRecord"),
        (of_workers(lambda: [GOOD, EnvironmentRecord("e", "m:C", 1)]), "a list that contains a EnvironmentRecord; all"),
        (of_workers(lambda: [{"name": "good"}]), "a list that contains a dict; all items must be PolicyWorkerRecord"),
        ({}, "implements no hook"),
        (
            {"rlframework_policy_worker": hookimpl(lambda: [GOOD], specname="rlframework_policy_worker")},
            "unknown hook 'rlframework_policy_worker'. Did you mean 'rlframework_policy_workers'?",
        ),
        ({"rlframework_policy_workers": lambda: [GOOD]}, "is not marked as a hook; decorate it with @hookimpl"),
        (
            {"rlframework_step_finished": hookimpl(lambda step, metrics=None: 0, specname="rlframework_step_finished")},
            "rlframework_step_finished has default values for metrics",
        ),
    ],
)
def test_a_hook_that_is_not_what_its_name_says_is_named(hooks, message):
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
    ("kind", "capability", "message"),
    [
        (
            GenerationEngineRecord,
            Capability.LORA,
            "the capability lora, one of policy_worker; capabilities of the kind",
        ),
        (EnvironmentRecord, Capability.MULTIMODAL, "one of policy_worker and generation_engine; capabilities of the"),
        (AlgorithmRecord, "acme:a:b", "capability 'acme:a:b'; capabilities of the kind algorithm: none. Write one of"),
    ],
)
def test_a_capability_of_another_kind_or_form_is_refused(kind, capability, message):
    record = kind("mine", "m:C", kind.supported_api, capabilities=frozenset({capability, "acme:x"}))
    assert message in fault_of(plugin_returning([record], f"rlframework_{kind.kind}s"))


@pytest.mark.parametrize("kind", Record.__subclasses__(), ids=lambda kind: kind.kind)
def test_a_plugin_declares_capabilities_of_its_own_on_any_kind_of_record(kind):
    own = frozenset({"acme:sparse_attention", *kind.supported_capabilities})
    record = kind("mine", "m:C", kind.supported_api, capabilities=own)
    assert read_plugin(plugin_returning([record], f"rlframework_{kind.kind}s")) == ([record], None)


def test_every_capability_is_one_of_a_kind():
    assert {one for kind in Record.__subclasses__() for one in kind.supported_capabilities} == set(Capability)


@pytest.mark.parametrize("kind", Record.__subclasses__(), ids=lambda kind: kind.kind)
def test_a_plugin_of_version_1_loads_or_is_told_what_to_do(kind):
    fault = read_plugin(plugin_returning([kind("mine", "m:C", 1)], f"rlframework_{kind.kind}s"))[1]
    if kind.supported_api == 1:
        assert fault is None
        return
    told = (
        f"'mine' is written for version 1 of the plugin API, but this rlframework-core has version {kind.supported_api}"
    )
    assert told in str(fault)
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
def test_an_extra_is_installed_from_the_clone_or_from_wheels(tmp_path, monkeypatch, extra, in_the_clone, elsewhere):
    root = Path(discovery.rlframework.__file__).parents[1]
    monkeypatch.chdir(root)
    assert discovery.install_command(extra) == f"pip install {in_the_clone}"
    monkeypatch.chdir(tmp_path)
    assert discovery.install_command(extra) == f"pip install {elsewhere.format(root=root)}"
    monkeypatch.setattr(discovery.rlframework, "__file__", str(tmp_path / "rlframework" / "__init__.py"))
    wheels = "(from the wheels of a release: with --find-links WHEELS)"
    assert discovery.install_command(extra) == f"pip install 'rlframework-core[{extra}]' {wheels}"


def test_an_agent_is_checked_when_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agents_for_loading.py").write_text(
        "def solve(sample, session): ...\n"
        "async def more(sample, session, tries=2): ...\n"
        "def one(task): ...\n"
        "def three(sample, session, client): ...\n"
        "class Solver: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("solve", "more"):
        assert load_agent(f"agents_for_loading:{name}").__name__ == name
    for name, problem in {
        "slove": r"has no 'slove'\. Did you mean 'solve'\?",
        "one": r"agents_for_loading\.py, line 3\) cannot be called with a sample and a session.*\(task\)",
        "three": r"cannot be called.*define `async def solve\(sample, session\)`",
        "Solver": r"is not a function",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            load_agent(f"agents_for_loading:{name}")


def test_a_name_that_no_cell_has_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    with pytest.raises(ConfigError, match=r"has no 'solve'\. Run the cell that defines it first$"):
        load_agent("__main__:solve")
    sys.modules["__main__"].__file__ = "program.py"
    with pytest.raises(ConfigError, match=r"has no 'solve'; objects defined in a script must be moved to a module$"):
        load_agent("__main__:solve")

"""From a file to a checked `RunConfig`: chooses the parts, types their sections, and refuses what cannot work.

Above `config` and `plugins`, which know nothing of each other's work: `config.load` merges, the manager names the
parts, `config.narrow` makes the run's model, `config.validate` and the parts' own checks find what is wrong.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from rlframework.config.base import Section
from rlframework.config.checks import check_run
from rlframework.config.findings import NOT_GIVEN, Finding, raise_findings
from rlframework.config.load import Tree, compose, escape_interpolation
from rlframework.config.narrow import OPEN_SECTIONS, narrow
from rlframework.config.policy import PolicyConfig
from rlframework.config.schema import run_schema
from rlframework.config.sections import RunConfig
from rlframework.config.validate import validate
from rlframework.config.yaml_text import Keys, to_yaml
from rlframework.errors import PluginError

if TYPE_CHECKING:
    from rlframework.plugins.manager import PluginManager, Registered

KIND_OF_SECTION: Mapping[str, str] = {
    "algorithm": "algorithm",
    "environment": "environment",
    "generation": "generation_engine",
    "worker_group": "worker_group",
}
"""Open section of the configuration to the kind of record that its `name` chooses."""

BACKEND = "policy_worker"
"""The kind of record that `policy.backend` chooses."""


def load_config(
    source: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str] = (),
    *,
    manager: PluginManager | None = None,
) -> RunConfig:
    """The checked configuration of a run.

    `source` is a YAML file, a mapping of the same shape, or a configuration to change; `overrides` are `a.b=value` as
    on the command line (see `rlframework.config.load.compose`). The plugins are found afresh, with those of
    `plugins:`, unless a `manager` is given. Raises a `ConfigError` (a `PluginError` where a part cannot be chosen)
    that lists everything that is wrong; nothing is written and no worker started.
    """
    return _checked(compose(source, overrides), manager)


def restore_config(values: Mapping[str, Any], *, manager: PluginManager) -> RunConfig:
    """The configuration from `dump_config`'s values, in another process: the same model, typed by its own plugins.

    Values are taken as they are (no `defaults`, no interpolation), and checks that depend on the device are left out.
    """
    tree = Tree(dict(values))
    config, _ = _typed(tree, manager)
    return config


def dump_config(config: RunConfig) -> dict[str, Any]:
    """Plain values (JSON's types) of a resolved configuration, for `restore_config`."""
    return config.model_dump(mode="json")


def config_yaml(config: RunConfig) -> str:
    """The resolved configuration as YAML, which `load_config` reads back to an equal configuration."""
    return to_yaml(escape_interpolation(dump_config(config)))


def config_schema(manager: PluginManager) -> dict[str, Any]:
    """The JSON schema of a configuration file, with the sections of all parts that `manager` can choose."""
    sections = {
        section: {name: _section_model(part, OPEN_SECTIONS[section]) for name, part in manager.registered(kind).items()}
        for section, kind in KIND_OF_SECTION.items()
    }
    return run_schema(sections, _backend_models(manager))


def resolve_device(device: str) -> str:
    """What "auto" comes to, "cpu" or "cuda". Torch is imported, to be asked, only where there are signs of a GPU."""
    if device != "auto":
        return device
    signs = "torch" in sys.modules or shutil.which("nvidia-smi") or any(Path("/dev").glob("nvidia[0-9]*"))
    if not signs:
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class _Choice:
    """The parts that a configuration names, and what went wrong in choosing them."""

    parts: dict[str, Registered] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    errors: list[PluginError] = field(default_factory=list)


class _Anything(Section):
    """Stands in for the section of a part that could not be chosen, so that only this is reported."""

    model_config = ConfigDict(extra="allow")


def _checked(tree: Tree, manager: PluginManager | None) -> RunConfig:
    manager = manager or _manager_of(tree)
    config, choice = _typed(tree, manager)
    findings = list(check_run(config, tree))
    device = resolve_device(config.device)
    from rlframework.plugins.check import check_config

    for part in choice.parts.values():
        for problem in check_config(config, part, device):
            origin = tree.origin(tuple(problem.key.split(".")))
            findings.append(Finding(problem.key, problem.message, NOT_GIVEN, origin, problem.hint, problem.undeclared))
    raise_findings(findings)
    return config


def _typed(tree: Tree, manager: PluginManager) -> tuple[RunConfig, _Choice]:
    """The validated configuration without the checks between keys, and the parts that it chose."""
    tree, choice = _choose(tree, manager)
    model = _model(tree, manager, choice)
    config, findings = validate(tree, model, _keys_of_others(choice, manager))
    only_plugins = not findings and len(choice.findings) == len(choice.errors)
    raise_findings([*choice.findings, *findings], choice.errors[0] if choice.errors and only_plugins else None)
    assert config is not None
    return config, choice


def _manager_of(tree: Tree) -> PluginManager:
    """The plugins that the configuration sees. A broken module under `plugins` is an error even if not chosen."""
    from rlframework.plugins.manager import create_manager

    modules = tree.values.get("plugins") or ()
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        modules = ()  # validation tells
    manager = create_manager(modules)
    findings = [
        Finding(
            "plugins", f"the module {module!r} cannot be used: {row.reason}", NOT_GIVEN, tree.origin(("plugins", index))
        )
        for index, module in enumerate(modules)
        for row in manager.listing()
        if row.status == "broken" and module in (row.name, row.distribution.removeprefix("module "))
    ]
    raise_findings(findings[:1])
    return manager


def _choose(tree: Tree, manager: PluginManager) -> tuple[Tree, _Choice]:
    """The parts that `tree` names, and `tree` with a section for each that it leaves to the defaults."""
    choice, values = _Choice(), dict(tree.values)
    for section, kind in KIND_OF_SECTION.items():
        default = OPEN_SECTIONS[section].model_fields["name"].default
        given = values.setdefault(section, {})
        if isinstance(given, Mapping):
            name = given.get("name", default if isinstance(default, str) else NOT_GIVEN)
            _select(choice, (section, "name"), kind, name, manager, tree)
    policy = values.get("policy")
    if isinstance(policy, Mapping):
        default = PolicyConfig.model_fields["backend"].default
        _select(choice, ("policy", "backend"), BACKEND, policy.get("backend", default), manager, tree)
    return replace(tree, values=values), choice


def _select(choice: _Choice, keys: Keys, kind: str, name: Any, manager: PluginManager, tree: Tree) -> None:
    key, origin = ".".join(map(str, keys)), tree.origin(keys)
    if not isinstance(name, str):
        known = ", ".join(sorted(manager.registered(kind))) or "none is installed"
        message = "missing, and has no default; one of" if name is NOT_GIVEN else "must be one of"
        choice.findings.append(Finding(key, f"{message}: {known}", name, origin))
        return
    try:
        choice.parts[str(keys[0])] = manager.select(kind, name)
    except PluginError as error:
        choice.findings.append(Finding("", str(error), NOT_GIVEN, origin))
        choice.errors.append(error)


def _model(tree: Tree, manager: PluginManager, choice: _Choice) -> type[RunConfig]:
    sections: dict[str, type[Section]] = {}
    for section, base in OPEN_SECTIONS.items():
        part = choice.parts.get(section)
        fallback = _Anything if isinstance(tree.values[section], Mapping) else base
        sections[section] = _section_model(part, base) if part else fallback
    unusable = {
        row.name: f"{row.status}: {row.reason}"
        for row in manager.listing()
        if row.status != "active" and row.kind in (BACKEND, None) and row.name not in PolicyConfig.model_fields
    }
    chosen = choice.parts.get("policy")
    return narrow(sections, _backend_models(manager), chosen.record.name if chosen else "", unusable)


def _backend_models(manager: PluginManager) -> dict[str, type[Section]]:
    return {
        name: _section_model(part, Section)
        for name, part in manager.registered(BACKEND).items()
        if part.record.config_model is not None
    }


def _section_model(part: Registered, base: type[Section]) -> type[Section]:
    model: type[BaseModel] | None = part.record.config_model
    if model is None:
        return base
    if not issubclass(model, base):
        raise PluginError(
            f"the {part.record.kind} {part.record.name!r} of {part.distribution} {part.version} is made wrongly: its "
            f"config_model {model.__name__} must derive from {base.__module__}.{base.__name__}"
        )
    return model


def _keys_of_others(choice: _Choice, manager: PluginManager) -> dict[Keys, str]:
    """Hints for keys that the parts which were not chosen, or are not installed, have."""
    from rlframework.plugins.messages import OWN_EXTRAS

    hints: dict[Keys, str] = {
        ("policy", name): (
            f"It would be the section of the backend `{name}`, which is not installed: "
            f"pip install 'rlframework-core[{name}]', or take the section out."
        )
        for name in OWN_EXTRAS[BACKEND]
    }
    for section, part in choice.parts.items():
        if section == "policy":
            continue
        for name, other in manager.registered(KIND_OF_SECTION[section]).items():
            for key in other.record.config_model.model_fields if other.record.config_model else ():
                hints[section, key] = (
                    f"It is a key of `{name}`, and {section}.name is `{part.record.name}`; "
                    f"the override `~{section}.{key}` takes it out."
                )
    return hints

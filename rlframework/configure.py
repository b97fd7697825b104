"""Loads a checked `RunConfig`: selects the plugins, types their sections, and rejects what cannot work.

It connects `config` and `plugins`, which do not import each other: `config.load` merges the sources, the plugin manager
selects the plugins, `config.narrow` builds the run's model, `config.validate` and the plugins' checks find problems.
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
"""Open section of the configuration to the kind of record that its `name` selects."""

BACKEND = "policy_worker"
"""The kind of record that `policy.backend` selects."""


def load_config(
    source: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str] = (),
    *,
    manager: PluginManager | None = None,
) -> RunConfig:
    """Load and check the configuration of a run.

    `source` is a YAML file, a mapping of the same shape, or a configuration to change; `overrides` are `a.b=value` as
    on the command line (see `rlframework.config.load.compose`). Without a `manager`, the installed plugins are
    discovered again, along with the modules under `plugins:`. Raises a `ConfigError` that lists every problem, or a
    `PluginError` if a plugin cannot be selected; nothing is written and no worker is started.
    """
    return _checked(compose(source, overrides), manager)


def restore_config(values: Mapping[str, Any], *, manager: PluginManager) -> RunConfig:
    """Rebuild the configuration from the values of `dump_config` in another process, typed by that process's plugins.

    Values are taken literally (no `defaults`, no interpolation), and device-dependent checks are skipped.
    """
    tree = Tree(dict(values))
    config, _ = _typed(tree, manager)
    return config


def dump_config(config: RunConfig) -> dict[str, Any]:
    """Return a resolved configuration as plain JSON values, for `restore_config`."""
    return config.model_dump(mode="json")


def dump_selected(config: RunConfig) -> dict[str, Any]:
    """Return plain JSON values like `dump_config`, without the sections of backends that are not selected."""
    values = dump_config(config)
    others = set(type(config.policy).model_fields) - {*PolicyConfig.model_fields, config.policy.backend}
    return values | {"policy": {key: value for key, value in values["policy"].items() if key not in others}}


def config_yaml(config: RunConfig) -> str:
    """Return a resolved configuration as YAML, which `load_config` reads back to an equal configuration."""
    return to_yaml(escape_interpolation(dump_config(config)))


def config_schema(manager: PluginManager) -> dict[str, Any]:
    """Return the JSON schema of a configuration file, with the sections of all plugins that `manager` can select."""
    sections = {
        section: {name: _section_model(part, OPEN_SECTIONS[section]) for name, part in manager.registered(kind).items()}
        for section, kind in KIND_OF_SECTION.items()
    }
    return run_schema(sections, _backend_models(manager))


def resolve_device(device: str) -> str:
    """Resolve "auto" to "cpu" or "cuda". Torch is imported for this only if there are signs of a GPU."""
    if device != "auto":
        return device
    signs = "torch" in sys.modules or shutil.which("nvidia-smi") or any(Path("/dev").glob("nvidia[0-9]*"))
    if not signs:
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class _Choice:
    """The plugins that a configuration selects, and the errors from selecting them."""

    parts: dict[str, Registered] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    errors: list[PluginError] = field(default_factory=list)


class _Anything(Section):
    """Accepts any keys for a plugin that could not be selected, so that only the selection error is reported."""

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
    """The validated configuration, without the checks between keys, and the plugins that it selects."""
    tree, choice = _choose(tree, manager)
    model = _model(tree, manager, choice)
    config, findings = validate(tree, model, _keys_of_others(choice, manager))
    only_plugins = not findings and len(choice.findings) == len(choice.errors)
    raise_findings([*choice.findings, *findings], choice.errors[0] if choice.errors and only_plugins else None)
    assert config is not None
    return config, choice


def _manager_of(tree: Tree) -> PluginManager:
    """The plugins available to the configuration. A broken module under `plugins` is an error even if not selected."""
    from rlframework.plugins.manager import create_manager

    modules = tree.values.get("plugins") or ()
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        modules = ()  # validation reports this
    manager = create_manager(modules)
    findings = [
        Finding(
            "plugins", f"module {module!r} cannot be used: {row.reason}", NOT_GIVEN, tree.origin(("plugins", index))
        )
        for index, module in enumerate(modules)
        for row in manager.listing()
        if row.status == "broken" and module in (row.name, row.distribution.removeprefix("module "))
    ]
    raise_findings(findings[:1])
    return manager


def _choose(tree: Tree, manager: PluginManager) -> tuple[Tree, _Choice]:
    """Select the plugins that `tree` names, and add to `tree` an empty section for each one left to its default."""
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
        message = "required key is missing; must be one of" if name is NOT_GIVEN else "must be one of"
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
            f"the {part.record.kind} {part.record.name!r} of {part.distribution} {part.version} is broken: its "
            f"config_model {model.__name__} must derive from {base.__module__}.{base.__name__}"
        )
    return model


def _keys_of_others(choice: _Choice, manager: PluginManager) -> dict[Keys, str]:
    """Hints for keys that belong to plugins which are not selected or not installed."""
    from rlframework.plugins.messages import OWN_EXTRAS

    hints: dict[Keys, str] = {
        ("policy", name): (
            f"This is the section of the backend `{name}`, which is not installed. Install it with "
            f"`pip install 'rlframework-core[{name}]'`, or remove the section."
        )
        for name in OWN_EXTRAS[BACKEND]
    }
    for section, part in choice.parts.items():
        if section == "policy":
            continue
        for name, other in manager.registered(KIND_OF_SECTION[section]).items():
            for key in other.record.config_model.model_fields if other.record.config_model else ():
                hints[section, key] = (
                    f"It is a key of `{name}`, but {section}.name is `{part.record.name}`. "
                    f"The override `~{section}.{key}` removes it."
                )
    return hints

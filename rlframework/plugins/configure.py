"""Loads a checked `RunConfig`: selects the plugins, types their sections, and rejects what cannot work.

`config.load` merges the sources, the plugin manager selects the plugins, `config.models` makes the run's model from
theirs, `config.validate` and the plugins' checks find problems.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict

from rlframework.base.errors import PluginError
from rlframework.base.secrets import secrets_of_environment
from rlframework.config.base import Section
from rlframework.config.device_defaults import Default, checkpoint_defaults, device_defaults
from rlframework.config.further_policies import FURTHER_POLICIES, in_section, problem_in_section, with_shared_keys
from rlframework.config.hints import Hints, models_in
from rlframework.config.load import Source, compose, escape_interpolation
from rlframework.config.models import Models, run_model, run_schema
from rlframework.config.policy import BatchingConfig, PolicyConfig
from rlframework.config.problems import MOST, NOT_GIVEN, Problem, raise_problems
from rlframework.config.sections import RunConfig
from rlframework.config.trust import require_trusted, require_trusted_imports
from rlframework.config.validate import check_further_policies, check_run, validate
from rlframework.config.yaml_text import Keys, Tree, to_yaml
from rlframework.plugins.check import check_config
from rlframework.plugins.discovery import extras, install_command
from rlframework.plugins.manager import PluginManager, Registered, create_manager
from rlframework.plugins.types import (
    RECORD_TYPES,
    Capability,
    DataProcessorRecord,
    PolicyWorkerRecord,
    Record,
)

OPEN_SECTIONS: Mapping[str, type[Record]] = {
    record_type.key.removesuffix(".name"): record_type
    for record_type in RECORD_TYPES.values()
    if record_type.key.endswith(".name")
}
"""Top-level sections whose keys depend on the plugin named in them, with the type of its record."""

BACKEND = PolicyWorkerRecord.kind
"""The kind of record that `policy.backend` selects."""

_OWNERS = 4
"""The most plugins that the hint about a key of other plugins names."""


class Loaded(NamedTuple):
    """A checked configuration, and the defaults that it has from its device.

    `not_installed`: problems of this installation alone, for a run on other machines.
    """

    config: RunConfig
    defaults: list[Default]
    not_installed: list[Problem]


def load_config(
    source: Source,
    overrides: Sequence[str] = (),
    *,
    manager: PluginManager | None = None,
    run: Path | None = None,
) -> RunConfig:
    """Load and check the configuration of a run.

    `source` is a YAML file, a mapping of the same shape, or a configuration to change; `overrides` are `a.b=value` as
    on the command line (see `rlframework.config.load.compose`). Without a `manager`, the installed plugins are
    discovered again, along with the modules under `plugins:`. `run` is the folder that `source` was found in, if it is
    that of a run which is not trusted (see `rlframework.config.trust`). Raises a `ConfigError` that lists every
    problem, or a `PluginError` if a plugin cannot be selected; nothing is written and no worker is started.
    """
    return load(source, overrides, manager=manager, run=run).config


def load(
    source: Source,
    overrides: Sequence[str] = (),
    *,
    manager: PluginManager | None = None,
    run: Path | None = None,
    elsewhere: bool = False,
) -> Loaded:
    """Load a configuration like `load_config`; with `elsewhere`, what is not installed here is no error."""
    tree = compose(source, overrides)
    if run is not None:
        require_trusted_imports(run, tree)
    manager = manager or manager_of(tree)
    tree = with_shared_keys(tree)
    config, selected = _typed(tree, manager)
    if run is not None:
        require_trusted(run, tree, config)
    device = resolve_device(config.device)
    defaults = [
        default
        for default in _device_defaults(config, device, selected)
        if tree.get(tuple(default.key.split("."))) is NOT_GIVEN
    ]
    if defaults:
        config, selected = _typed(tree.with_values({default.key: default.value for default in defaults}), manager)
    problems = [*check_run(config), *check_further_policies(config, device)]
    for section, part in selected.items():
        if (name := section.partition(".")[0]) in FURTHER_POLICIES:
            problems += [problem_in_section(problem, name) for problem in check_config(config.of(name), part, device)]
        else:
            problems += check_config(config, part, device)
    problems = [_explained(problem, tree, manager) for problem in problems]
    here = [problem for problem in problems if elsewhere and problem.installation]
    raise_problems([problem for problem in problems if problem not in here])
    return Loaded(config, defaults, here)


def _explained(problem: Problem, tree: Tree, manager: PluginManager) -> Problem:
    """`problem` with where its value was written, and without a hint with what the value means in another library."""
    hint = problem.hint or manager.hints("value_hint", key=problem.key, value=problem.given)
    return replace(problem, hint=hint, origin=tree.origin(tuple(problem.key.split("."))))


def _device_defaults(config: RunConfig, device: str, selected: Mapping[str, Registered]) -> list[Default]:
    """The defaults of the run, and of each further policy under its own keys."""
    parts = {section: part for section, part in selected.items() if section.partition(".")[0] not in FURTHER_POLICIES}
    defaults = _defaults_of(config, device, parts) + checkpoint_defaults(config)
    for name in config.further_policies:
        found = _defaults_of(config.of(name), device, {"policy": selected[name]})
        defaults += [replace(each, key=in_section(each.key, name)) for each in found]
    return defaults


def _defaults_of(config: RunConfig, device: str, selected: Mapping[str, Registered]) -> list[Default]:
    records = [part.record for part in selected.values()]
    bfloat16 = any(Capability.BFLOAT16 in record.capabilities for record in records if record.kind == BACKEND)
    defaults = device_defaults(config, device, bfloat16=bfloat16)
    for record in records:
        if record.device_defaults is not None:
            defaults += record.device_defaults(config, device)
    return defaults


def restore_config(values: Mapping[str, Any], *, manager: PluginManager) -> RunConfig:
    """Rebuild the configuration from the values of `dump_config` in another process, typed by that process's plugins.

    Values are taken literally (no `defaults`, no interpolation), and device-dependent checks are skipped.
    """
    return _typed(Tree(dict(values)), manager)[0]


def dump_config(config: RunConfig) -> dict[str, Any]:
    """Return a resolved configuration as plain JSON values, for `restore_config`."""
    return config.model_dump(mode="json")


def dump_selected(config: RunConfig) -> dict[str, Any]:
    """Return plain JSON values like `dump_config`, without the sections of backends that are not selected."""
    values = dump_config(config)
    for name, section in {"policy": config.policy, **config.further_policies}.items():
        known = {*PolicyConfig.model_fields, *FURTHER_POLICIES.get(name, PolicyConfig).model_fields, section.backend}
        others = set(type(section).model_fields) - known
        values[name] = {key: value for key, value in values[name].items() if key not in others}
    return values


def config_yaml(config: RunConfig) -> str:
    """Return a resolved configuration as YAML, which `load_config` reads back to an equal configuration.

    Secrets of the environment are written as references to their variables; see `rlframework.base.secrets`.
    """
    return to_yaml(escape_interpolation(dump_config(config), secrets_of_environment()))


def config_schema(manager: PluginManager) -> dict[str, Any]:
    """Return the JSON schema of a configuration file, with the sections of all plugins that `manager` can select."""
    sections = {
        section: tuple((name, _section_model(part)) for name, part in manager.registered(record_type.kind).items())
        for section, record_type in OPEN_SECTIONS.items()
    }
    processors = manager.registered(DataProcessorRecord.kind).values()
    models: list[type[Section]] = [BatchingConfig, *map(_section_model, processors)]  # a union has each only once
    return run_schema(sections, _backend_models(manager), models)


def resolve_device(device: str) -> str:
    """Resolve "auto" to "cpu" or "cuda". Torch is imported for this only if there are signs of a GPU."""
    if device != "auto":
        return device
    signs = "torch" in sys.modules or shutil.which("nvidia-smi") or any(Path("/dev").glob("nvidia[0-9]*"))
    if not signs:
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class _Anything(Section):
    """Accepts any keys for a plugin that could not be selected, so that only the selection error is reported."""

    model_config = ConfigDict(extra="allow")


def _typed(tree: Tree, manager: PluginManager) -> tuple[RunConfig, dict[str, Registered]]:
    """The validated configuration, without the checks between keys, and the plugins that it selects by section."""
    tree = replace(tree, values={section: {} for section in OPEN_SECTIONS} | tree.values)  # omitted: all defaults
    selected, problems = _select(tree, manager)
    tree = _without_defaults_of_others(tree, selected, manager)
    sections: dict[str, type[Section]] = {}
    for section, record_type in OPEN_SECTIONS.items():
        fallback = _Anything if isinstance(tree.values[section], Mapping) else record_type.section
        sections[section] = _section_model(selected[section]) if section in selected else fallback
    unusable = [
        (row.name, f"{row.status}: {row.reason}")
        for row in manager.listing()
        if row.status != "active" and row.kind in (BACKEND, None) and row.name not in PolicyConfig.model_fields
    ]
    backend = selected["policy"].record.name if "policy" in selected else ""
    further = tuple(
        (
            name,
            selected[name].record.name if name in selected else "",
            _section_model(selected[group]) if (group := f"{name}.worker_group") in selected else _Anything,
            _batching_model(name, selected),
        )
        for name in FURTHER_POLICIES
        if tree.values.get(name) is not None
    )
    batching = _batching_model("policy", selected)
    model = run_model(tuple(sections.items()), _backend_models(manager), backend, tuple(unusable), further, batching)
    config, invalid = validate(tree, model, _keys_of_others(selected, manager), MOST - len(problems), manager.hints)
    raise_problems(problems + invalid)
    assert config is not None
    return config, selected


def manager_of(tree: Tree) -> PluginManager:
    """The plugins available to the configuration. A broken module under `plugins` is an error even if not selected."""
    modules = tree.values.get("plugins") or ()
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        modules = ()  # validation reports this
    manager = create_manager(modules)
    for row in manager.listing() if modules else ():
        module = row.distribution.removeprefix("module ")
        module = module if module in modules else row.name
        if row.status == "broken" and module in modules:
            origin = tree.origin(("plugins", modules.index(module)))
            raise_problems([Problem("plugins", f"module {module!r} cannot be used: {row.reason}", origin=origin)])
    return manager


def _select(tree: Tree, manager: PluginManager) -> tuple[dict[str, Registered], list[Problem]]:
    """The plugins that `tree` names, by section, and the problems of those that cannot be selected."""
    selected, problems = dict[str, Registered](), list[Problem]()
    types: tuple[type[Record], ...] = (*OPEN_SECTIONS.values(), PolicyWorkerRecord, DataProcessorRecord)
    places = [(record_type.key.partition(".")[0], record_type) for record_type in types]
    for name in FURTHER_POLICIES:
        places += [(name, PolicyWorkerRecord), (name, DataProcessorRecord)]
        places.append((f"{name}.worker_group", OPEN_SECTIONS["worker_group"]))
    for section, record_type in places:
        keys, key = tuple(section.split(".")), record_type.key.partition(".")[2]
        model = PolicyConfig if key in PolicyConfig.model_fields else record_type.section
        given, origin = tree.get(keys), tree.origin((*keys, key))
        if not isinstance(given, Mapping):
            continue  # validation reports this
        if record_type is DataProcessorRecord and not manager.registered(record_type.kind):
            continue  # the policy reports this
        parts = manager.registered(record_type.kind).values() if key == "name" else ()
        name = given.get(key, model.model_fields[key].default)
        if isinstance(name, str):
            try:
                part = manager.select(record_type.kind, name)
                selected[f"{section}.batching" if record_type is DataProcessorRecord else section] = part
            except PluginError as error:
                message = in_section(str(error), keys[0]) if keys[0] in FURTHER_POLICIES else str(error)
                hint = _hints_for_unknown_keys(keys, given, parts, manager.hints)
                problems.append(Problem("", message, hint, origin=origin, cause=PluginError(message)))
        else:
            known = ", ".join(sorted(manager.registered(record_type.kind))) or "none is installed"
            message = "must be one of" if key in given else "required key is missing; must be one of"
            shown = given.get(key, NOT_GIVEN)
            hint = _hints_for_unknown_keys(keys, given, parts, manager.hints)
            problems.append(Problem(f"{section}.{key}", f"{message}: {known}", hint, given=shown, origin=origin))
    return selected, problems


def _hints_for_unknown_keys(section: Keys, given: Mapping[str, Any], parts: Iterable[Registered], hints: Hints) -> str:
    """Say what the keys of `section` are called here that none of the `parts` has, of which none is selected."""
    known = {key for part in parts for key in _section_model(part).model_fields}
    own = given.get("name")  # a plugin that is not installed has a section of its own name
    unknown = {key: value for key, value in given.items() if key not in known and key != own}
    return hints("key_hint", path=tuple(map(str, section)), value=unknown, model=None) if known and unknown else ""


def _batching_model(policy: str, selected: Mapping[str, Registered]) -> type[Section]:
    """The model of the section `batching` of a policy."""
    part = selected.get(f"{policy}.batching")
    return BatchingConfig if part is None else _section_model(part)


def _backend_models(manager: PluginManager) -> Models:
    parts = manager.registered(BACKEND).items()
    return tuple((name, _section_model(part)) for name, part in parts if part.record.config_model is not None)


def _section_model(part: Registered) -> type[Section]:
    model = part.record.config_model or part.record.section
    assert issubclass(model, Section)  # checked when the plugin was loaded
    return model


def _without_defaults_of_others(tree: Tree, selected: Mapping[str, Registered], manager: PluginManager) -> Tree:
    """`tree` without what is about other plugins than the selected ones and says nothing.

    That is null, by which a file leaves out a key that it inherits; and the defaults of other plugins in sections whose
    `name` was overridden: the configuration of a run has every key, so those of its earlier plugin would be unknown.
    """
    values = dict(tree.values)
    for section, record_type in OPEN_SECTIONS.items():
        if section not in selected or not isinstance(tree.values[section], Mapping):
            continue
        models = [_section_model(part) for part in manager.registered(record_type.kind).values()]
        keys = {key for model in models for key in model.model_fields}
        switched = (section, "name") in tree.overridden
        defaults = [model.model_construct().model_dump(mode="json") for model in models] if switched else []
        own = _section_model(selected[section]).model_fields
        values[section] = {
            key: _without_defaults_inside(tree, (section, key), own[key].annotation, defaults) if key in own else value
            for key, value in tree.values[section].items()
            if key in own or not _says_nothing(tree, (section, key), keys, defaults)
        }
    return replace(tree, values=values)


def _without_defaults_inside(tree: Tree, keys: Keys, annotation: Any, defaults: Iterable[Mapping[str, Any]]) -> Any:
    """The value at `keys`, a key of the selected plugin, without what says nothing in a section of others inside."""
    value, models = tree.get(keys), models_in(annotation)
    others = [inside for each in defaults if isinstance(inside := each.get(str(keys[-1])), Mapping)]
    if not (models and others and isinstance(value, Mapping)):
        return value
    own = {name for model in models for name in model.model_fields}
    return {key: item for key, item in value.items() if key in own or not _says_nothing(tree, (*keys, key), (), others)}


def _says_nothing(tree: Tree, keys: Keys, others: Collection[str], defaults: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the value at `keys`, of one of the `others` by its last key, is null or a default that nobody wrote."""
    key, value = str(keys[-1]), tree.get(keys)
    if value is None:
        return key in others
    return keys not in tree.overridden and any(key in each and each[key] == value for each in defaults)


def _keys_of_others(selected: Mapping[str, Registered], manager: PluginManager) -> dict[Keys, str]:
    """Hints for keys that belong to plugins which are not selected or not installed."""
    hints: dict[Keys, str] = {
        (section, name): (
            f"If this is the section of a backend: `{name}` is not installed. Install it with "
            f"{install_command(name, '`')}, or remove the section."
        )
        for name in extras() - {row.name for row in manager.listing()}
        for section in ("policy", *FURTHER_POLICIES)
    }
    owners: dict[tuple[str, str], list[str]] = {}
    for section, record_type in OPEN_SECTIONS.items():
        for name, other in manager.registered(record_type.kind).items() if section in selected else ():
            for key in _section_model(other).model_fields:
                owners.setdefault((section, key), []).append(f"`{name}`")
    for (section, key), names in owners.items():
        more = ", ..." if len(names) > _OWNERS else ""
        hints[section, key] = (
            f"It is a key of {', '.join(names[:_OWNERS])}{more}, but {section}.name is "
            f"`{selected[section].record.name}`. Remove it; the override `~{section}.{key}` does that, too."
        )
    return hints

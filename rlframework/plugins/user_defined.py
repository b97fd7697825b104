"""Loads user-defined environments, algorithms, losses and rewards from import paths `module:name`, without a plugin.

The current directory is importable, as it is for `plugins:`. Any problem with a path is a `ConfigError` that says what
to write. Nothing is called except the import of the module and the constructor of a loss.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter
from typing import Any, TypeAlias, cast

from rlframework.base.errors import ConfigError, PluginError
from rlframework.plugins.discovery import check_model, did_you_mean, make_current_directory_importable
from rlframework.plugins.types import (
    API_VERSION,
    RECORD_TYPES,
    AlgorithmRecord,
    Capability,
    EnvironmentRecord,
    Record,
)

SINGULAR = ("sample", "prompt", "completion", "answer")
PLURAL = tuple(f"{name}s" for name in SINGULAR)
"""Parameter names of a reward function that scores one completion, or a batch."""

VERL_VALUES = ("data_source", "ground_truth", "extra_info")
"""Values of the row that a reward function with verl's signature gets beside `solution_str`."""

ACCEPTED_FORMS = (
    "A reward function, sync or async, takes any of (samples, prompts, completions, answers), including completions, "
    "and returns a list; or any of (sample, prompt, completion, answer), including completion, and returns one value. "
    "Examples: `def score(samples, completions): ...`, `def score(prompt, completion, answer): ...`. A function with "
    "TRL's signature, `def score(prompts, completions, **columns)`, gets the columns of the rows by name; one with "
    "verl's is `def compute_score(data_source, solution_str, ground_truth, extra_info=None)`"
)

_ADVANTAGE_FORM = (
    "define `def compare(rewards, rollout)`, which returns the advantages of the rewards of each prompt, a tensor of "
    "the same shape"
)
_AGENT_FORM = "define `async def solve(sample, session)` or `def solve(sample, session)`"

_LOSS_ATTRIBUTES = ("loss_type", "input_type", "wants_entropy", "at_sampling_temperature")
_LOSS_FORM = (
    "A loss is callable and has " + ", ".join(_LOSS_ATTRIBUTES) + " (rlframework.interfaces.loss.LossFunction); give "
    "the path of one, or of a class or function that creates one from the section's other keys"
)


class Convention(Enum):
    """The framework whose signature a reward function has."""

    OWN = "rlframework"
    TRL = "TRL"
    VERL = "verl"


@dataclass(frozen=True)
class RewardForm:
    """The calling convention of a reward function: `batched` or one completion per call, and async or not.

    `names` are its parameter names for texts and samples; `place` is its file and line. In the conventions of TRL and
    verl, `required` are the values of the row that it cannot be called without, `optional` those with a default.
    """

    convention: Convention
    batched: bool
    names: tuple[str, ...]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    is_async: bool = False
    place: str = ""


def load_import_path(path: str) -> Any:
    """Return the object at the import path `path`. Raises `ConfigError` if there is none."""
    module_name, _, name = path.partition(":")
    if not name or not all(part.isidentifier() for part in [*module_name.split("."), *name.split(".")]):
        raise ConfigError(
            f"{path!r} is not an import path: write module:name, such as my_rewards:score for my_rewards.py"
        )
    make_current_directory_importable()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(_import_error(path, module_name, error)) from error
    try:
        return attrgetter(name)(module)
    except AttributeError as error:
        file = getattr(module, "__file__", None) or "no file"
        near = did_you_mean(name, [known for known in vars(module) if not known.startswith("_")])
        hint = f".{near}" if near else ""
        if module_name == "__main__":
            cell = near or " Run the cell that defines it first"
            hint = "; objects defined in a script must be moved to a module" if file != "no file" else f".{cell}"
        raise ConfigError(f"{path!r}: module {module_name!r} ({file}) has no {name!r}{hint}") from error


def load_agent(path: str) -> Callable[..., Any]:
    """Return the agent at the import path `path`, a function that can be called with a sample and a session.

    Raises a `ConfigError` that says what to define.
    """
    return _load_function(path, ("a sample", "a session"), _AGENT_FORM)


def load_advantage(path: str) -> Callable[..., Any]:
    """Return the function at `path`, which can be called with the rewards of groups and a rollout.

    Raises a `ConfigError` that says what to define.
    """
    return _load_function(path, ("rewards", "a rollout"), _ADVANTAGE_FORM)


def _load_function(path: str, arguments: tuple[str, str], form: str) -> Callable[..., Any]:
    """Return the function at `path`, which can be called with two `arguments`; `form` says what to define."""
    found = load_import_path(path)
    if not callable(found) or isinstance(found, type):
        raise ConfigError(f"{path!r} is not a function; {form}")
    try:
        parameters = inspect.signature(found)
    except (ValueError, TypeError):  # of a function without a readable signature
        return cast("Callable[..., Any]", found)
    try:
        parameters.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{path!r} ({_place(found)}) cannot be called with {' and '.join(arguments)}: its parameters are "
            f"{parameters} ({error}); {form}"
        ) from error
    return cast("Callable[..., Any]", found)


BASE_CLASSES: Mapping[str, str] = {
    EnvironmentRecord.kind: "rlframework.interfaces.environment.Environment",
    AlgorithmRecord.kind: "rlframework.algorithms.algorithm.Algorithm",
}
"""The base class of each kind of record whose name may be the import path `module:Class` of a user's own class."""


def own_record(kind: str, path: str) -> Record:
    """Return a record of the class at `path`. Its attribute `config_model`, if any, types its section."""
    key, (interface, _, name) = RECORD_TYPES[kind].key, BASE_CLASSES[kind].rpartition(".")
    try:
        target: Any = load_import_path(path)
    except ConfigError as error:
        raise PluginError(f"{key}: {error}") from error
    base: Any = getattr(sys.modules.get(interface), name, ())  # a subclass has imported it
    if not isinstance(target, type) or not issubclass(target, base):
        raise PluginError(f"{key}: {path!r} must be a class derived from {interface}.{name}")
    if missing := sorted(getattr(target, "__abstractmethods__", ())):
        raise PluginError(f"{key}: {path!r} does not implement {', '.join(missing)}")
    has_episodes = getattr(target, "episode", None) is not getattr(base, "episode", None)
    declared = frozenset({Capability.EPISODES} if has_episodes else ())
    record = RECORD_TYPES[kind](path, path, API_VERSION, "your own", declared, getattr(target, "config_model", None))
    check_model(record)
    return record


def load_loss(path: str, keys: Mapping[str, Any]) -> Any:
    """Return the loss at `path`: the object itself, or the result of calling the class or function with `keys`.

    Raises `ConfigError` if it is not an `rlframework.interfaces.loss.LossFunction`, or if the call raises.
    """
    found = load_import_path(path)
    if not isinstance(found, type) and _is_loss(found):
        if keys:
            raise ConfigError(f"{path!r} is a loss instance and takes no keys, but {sorted(keys)} are given")
        return found
    if not callable(found):
        raise ConfigError(f"{path!r} is not a loss or callable, but {type(found).__name__}. {_LOSS_FORM}")
    try:
        loss = found(**keys)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{path!r} ({_place(found)}) raised {type(error).__name__} when called with {dict(keys)}: {error}. "
            f"{_LOSS_FORM}"
        ) from error
    if not _is_loss(loss):
        raise ConfigError(f"{path!r} returned {type(loss).__name__}, which is not a loss. {_LOSS_FORM}")
    return loss


def _is_loss(found: Any) -> bool:
    return callable(found) and all(hasattr(found, name) for name in _LOSS_ATTRIBUTES)


def load_reward(path: str) -> tuple[Callable[..., Any], RewardForm]:
    """Return the reward function at `path` and its calling convention. Raises `ConfigError` if it is not usable."""
    function = load_import_path(path)
    if isinstance(function, type):
        raise ConfigError(f"{path!r} is a class; give a function or a callable object instead. {ACCEPTED_FORMS}")
    if not callable(function):
        raise ConfigError(f"{path!r} is not callable, but {type(function).__name__}. {ACCEPTED_FORMS}")
    return function, reward_form(path, function)


def reward_form(path: str, function: Callable[..., Any]) -> RewardForm:
    """Return the calling convention of `function`. Raises `ConfigError` if its parameters do not fit any."""
    place, kind = _place(function), cast("Any", type(function))
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(kind.__call__)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path!r} has no readable signature ({error}). {ACCEPTED_FORMS}") from error
    form = _trl_form(parameters) or _verl_form(parameters) or _own_form(parameters)
    if form is None:
        signature = f"({', '.join(map(str, parameters))})"
        open_ended = [*parameters, inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]
        remedy = "Add **columns, to get columns of the rows by name. " if _trl_form(open_ended) else ""
        raise ConfigError(f"{path!r} ({place}) has the unsupported parameters {signature}. {remedy}{ACCEPTED_FORMS}")
    return replace(form, is_async=is_async, place=place)


_Parameters: TypeAlias = Collection[inspect.Parameter]


def _own_form(parameters: _Parameters) -> RewardForm | None:
    """The form of a function that takes any of `SINGULAR` or of `PLURAL`."""
    asked = [p for p in parameters if p.default is p.empty or p.name in (*SINGULAR, *PLURAL)]
    names = tuple(p.name for p in asked)
    batched = "completions" in names
    fits = set(names) <= set(PLURAL if batched else SINGULAR) and (batched or "completion" in names)
    if not fits or any(p.kind is p.POSITIONAL_ONLY for p in asked):
        return None
    return RewardForm(Convention.OWN, batched, names)


def _trl_form(parameters: _Parameters) -> RewardForm | None:
    """The form of a function that has `completions` and `**columns`, and neither `samples` nor `answers`."""
    texts = ("prompts", "completions")
    named = _named(parameters)
    open_ended = [p.kind for p in parameters if p.name not in named] == [inspect.Parameter.VAR_KEYWORD]
    if not open_ended or "completions" not in named or named.keys() & {"samples", "answers"}:
        return None
    required = tuple(name for name, needed in named.items() if needed and name not in texts)
    optional = tuple(name for name, needed in named.items() if not needed and name not in texts)
    return RewardForm(Convention.TRL, True, texts, required, optional)


def _verl_form(parameters: _Parameters) -> RewardForm | None:
    """The form of a function that has `solution_str`, any of `VERL_VALUES`, and parameters with defaults."""
    named = _named(parameters)
    others = [p.kind for p in parameters if p.name not in named]
    required = tuple(name for name, needed in named.items() if needed and name != "solution_str")
    if "solution_str" not in named or not {*required} <= {*VERL_VALUES}:
        return None
    if inspect.Parameter.POSITIONAL_ONLY in others:
        return None
    takes_all = inspect.Parameter.VAR_KEYWORD in others
    optional = tuple(name for name in VERL_VALUES if name not in required and (takes_all or name in named))
    return RewardForm(Convention.VERL, False, ("solution_str",), required, optional)


def _named(parameters: _Parameters) -> dict[str, bool]:
    """The parameters that can be given by name, and whether they must be."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default is p.empty for p in parameters if p.kind in kinds}


def _place(function: Callable[..., Any]) -> str:
    plain: Any = inspect.unwrap(function)
    plain = getattr(plain, "func", plain)  # what a functools.partial calls
    call: Any = getattr(plain, "__init__", None) if isinstance(plain, type) else type(plain).__call__
    code = getattr(plain, "__code__", None) or getattr(call, "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code else "no Python file"


def _import_error(path: str, module: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return (
            f"{path!r}: there is no module {error.name!r} in the current directory ({os.getcwd()}) or among the "
            "installed packages"
        )
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{path!r}: the import of {module!r} raised {type(error).__name__}: {error}{place}"

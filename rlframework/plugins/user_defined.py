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
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

from rlframework.errors import ConfigError, PluginError
from rlframework.plugins.loading import check_model, did_you_mean, make_current_directory_importable
from rlframework.plugins.types import API_VERSION, AlgorithmRecord, Capability, EnvironmentRecord

SINGULAR = ("sample", "prompt", "completion", "answer")
PLURAL = tuple(f"{name}s" for name in SINGULAR)
"""Parameter names of a reward function that scores one completion, or a batch."""

ACCEPTED_FORMS = (
    "A reward function, sync or async, takes any of (samples, prompts, completions, answers), including completions, "
    "and returns a list; or any of (sample, prompt, completion, answer), including completion, and returns one value. "
    "Examples: `def score(samples, completions): ...`, `def score(prompt, completion, answer): ...`. A function with "
    "TRL's signature, `def score(prompts, completions, **columns)`, gets the columns of the rows by name"
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


@dataclass(frozen=True)
class RewardForm:
    """The calling convention of a reward function: `batched` or one completion per call, and async or not.

    `names` are its parameter names; `place` is its file and line. `columns`: TRL's convention, with `prompts`,
    `completions` and each column of the rows as keyword arguments; `required` are the columns that it cannot be called
    without, `optional` those with a default.
    """

    batched: bool
    names: tuple[str, ...]
    is_async: bool
    place: str
    columns: bool = False
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


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
            hint = "; objects defined in a script must be moved to a module"
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


def environment_record(path: str) -> EnvironmentRecord:
    """Return a record of the environment class at `path`. Its attribute `config_model`, if any, types its section."""
    target, base = _load_class(EnvironmentRecord.key, path, "rlframework.interfaces.environment", "Environment")
    model = getattr(target, "config_model", None)
    declared = frozenset({Capability.EPISODES} if getattr(target, "episode", None) is not base.episode else ())
    record = EnvironmentRecord(path, path, API_VERSION, "your own", declared, model)
    check_model(record)
    return record


def algorithm_record(path: str) -> AlgorithmRecord:
    """Return a record of the algorithm class at `path`. Its attribute `config_model`, if any, types its section."""
    target, _ = _load_class(AlgorithmRecord.key, path, "rlframework.algorithm", "Algorithm")
    record = AlgorithmRecord(path, path, API_VERSION, "your own", config_model=getattr(target, "config_model", None))
    check_model(record)
    return record


def _load_class(key: str, path: str, interface: str, name: str) -> tuple[Any, Any]:
    """Return the class at `path` and the base class `interface.name`, from which it must be derived."""
    try:
        target: Any = load_import_path(path)
    except ConfigError as error:
        raise PluginError(f"{key}: {error}") from error
    base: Any = getattr(sys.modules.get(interface), name, ())  # a subclass has imported it
    if not isinstance(target, type) or not issubclass(target, base):
        raise PluginError(f"{key}: {path!r} must be a class derived from {interface}.{name}")
    if missing := sorted(getattr(target, "__abstractmethods__", ())):
        raise PluginError(f"{key}: {path!r} does not implement {', '.join(missing)}")
    return target, base


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
    if _takes_columns(parameters):
        texts = ("prompts", "completions")
        named = [p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in texts]
        required = tuple(p.name for p in named if p.default is p.empty)
        optional = tuple(p.name for p in named if p.default is not p.empty)
        return RewardForm(True, texts, is_async, place, columns=True, required=required, optional=optional)
    asked = [p for p in parameters if p.default is p.empty or p.name in (*SINGULAR, *PLURAL)]
    names = tuple(p.name for p in asked)
    batched = "completions" in names
    fits = set(names) <= set(PLURAL if batched else SINGULAR) and (batched or "completion" in names)
    if not fits or any(p.kind is p.POSITIONAL_ONLY for p in asked):
        signature = f"({', '.join(map(str, parameters))})"
        raise ConfigError(f"{path!r} ({place}) has the unsupported parameters {signature}. {ACCEPTED_FORMS}")
    return RewardForm(batched, names, is_async, place)


def _takes_columns(parameters: Collection[inspect.Parameter]) -> bool:
    """Whether the function follows TRL: `completions` and `**columns`, and neither `samples` nor `answers`."""
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = [p.kind for p in parameters if p.name not in named] == [inspect.Parameter.VAR_KEYWORD]
    return open_ended and "completions" in named and not named & {"samples", "answers"}


def _place(function: Callable[..., Any]) -> str:
    plain: Any = inspect.unwrap(function)
    plain = getattr(plain, "func", plain)  # what a functools.partial calls
    kind: Any = type(plain)
    code = getattr(plain, "__code__", None) or getattr(kind.__call__, "__code__", None)
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

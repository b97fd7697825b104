"""A user's own parts that are no plugin: what an import path `module:name` names, and what it must be.

The current directory is importable, as it is for `plugins:`. Everything wrong with a path is a `ConfigError` that says
what to write; nothing is called here but the module's own import, and what makes a loss.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlframework.errors import ConfigError, PluginError
from rlframework.plugins.loading import make_current_directory_importable
from rlframework.plugins.reading import check_model
from rlframework.plugins.types import API_VERSION, EnvironmentRecord

SINGULAR = ("sample", "prompt", "completion", "answer")
"""What a reward function may ask for, by the names of its parameters; with an s behind each it gets all at once."""

ACCEPTED_FORMS = (
    "Accepted are functions, sync or async, of some of (samples, prompts, completions, answers), which return a list, "
    "or of some of (sample, prompt, completion, answer), which return one value; completions, or completion, among "
    "them. Such as `def score(samples, completions): ...` or `def score(prompt, completion, answer): ...`"
)

_LOSS_ATTRIBUTES = ("loss_type", "input_type", "wants_entropy", "at_sampling_temperature")
_LOSS_FORM = (
    "A loss can be called and has " + ", ".join(_LOSS_ATTRIBUTES) + " (rlframework.interfaces.loss.LossFunction); name "
    "one, or a class or function that makes one of the section's further keys"
)


@dataclass(frozen=True)
class RewardForm:
    """How a reward function is called: with all answers at once or one at a time, with what, awaited or not.

    `names` are those of its parameters; `place` is its file and line.
    """

    batched: bool
    names: tuple[str, ...]
    is_async: bool
    place: str


def load_own(path: str) -> Any:
    """The object at the import path `path`; a `ConfigError` where there is none."""
    module_name, _, name = path.partition(":")
    if not name or not all(part.isidentifier() for part in [*module_name.split("."), *name.split(".")]):
        raise ConfigError(f"{path!r} is no import path: write module:name, such as my_rewards:score for my_rewards.py")
    make_current_directory_importable()
    try:
        found = module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(_import_error(path, module_name, error)) from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            file = getattr(module, "__file__", None) or "built into Python"
            raise ConfigError(f"{path!r}: the module {module_name!r} ({file}) has no {name!r}") from error
    return found


def environment_record(path: str) -> EnvironmentRecord:
    """A record of the environment class at `path`; its attribute `config_model`, if any, types its section."""
    try:
        target = load_own(path)
    except ConfigError as error:
        raise PluginError(f"environment.name: {error}") from error
    interface = "rlframework.interfaces.environment"
    base = getattr(sys.modules.get(interface), "Environment", ())  # who derives from it has imported it
    if not isinstance(target, type) or not issubclass(target, base):
        raise PluginError(f"environment.name: {path!r} is no class that derives from {interface}.Environment")
    if missing := sorted(getattr(target, "__abstractmethods__", ())):
        raise PluginError(f"environment.name: {path!r} lacks what every environment has: {', '.join(missing)}")
    model = getattr(target, "config_model", None)
    record = EnvironmentRecord(path, path, API_VERSION, summary="your own", config_model=model)
    check_model(record)
    return record


def load_loss(path: str, keys: Mapping[str, Any]) -> Any:
    """The loss at `path`: an object that is one, or what the class or function there makes of `keys`.

    A `ConfigError` where it is no `rlframework.interfaces.loss.LossFunction`, and where making it raises.
    """
    found = load_own(path)
    if not isinstance(found, type) and _is_loss(found):
        if keys:
            raise ConfigError(
                f"{path!r} is a loss that is made already: it takes no keys, and {sorted(keys)} are given"
            )
        return found
    if not callable(found):
        raise ConfigError(f"{path!r} is no loss and makes none, it is {type(found).__name__}. {_LOSS_FORM}")
    try:
        loss = found(**keys)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{path!r} ({_place(found)}) raised {type(error).__name__} when it was to make a loss of {dict(keys)}: "
            f"{error}. {_LOSS_FORM}"
        ) from error
    if not _is_loss(loss):
        raise ConfigError(f"{path!r} makes {type(loss).__name__}, which is no loss. {_LOSS_FORM}")
    return loss


def _is_loss(found: Any) -> bool:
    return callable(found) and all(hasattr(found, name) for name in _LOSS_ATTRIBUTES)


def load_reward(path: str) -> tuple[Callable[..., Any], RewardForm]:
    """The reward function at `path`, and how it is called; a `ConfigError` where it cannot be used as one."""
    function = load_own(path)
    if isinstance(function, type):
        raise ConfigError(f"{path!r} is a class: name a function, or an object that can be called. {ACCEPTED_FORMS}")
    if not callable(function):
        raise ConfigError(f"{path!r} cannot be called, it is {type(function).__name__}. {ACCEPTED_FORMS}")
    return function, reward_form(path, function)


def reward_form(path: str, function: Callable[..., Any]) -> RewardForm:
    """See `RewardForm`; a `ConfigError` names the parameters that do not fit."""
    place = _place(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path!r} does not tell its parameters ({error}). {ACCEPTED_FORMS}") from error
    names = tuple(parameter.name for parameter in parameters if _is_asked_for(parameter))
    batched = "completions" in names
    known = [f"{name}s" for name in SINGULAR] if batched else SINGULAR
    strange = [name for name in names if name not in known]
    by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and _is_asked_for(p)]
    if strange or by_place or ("completion" not in names and not batched):
        signature = f"({', '.join(str(parameter) for parameter in parameters)})"
        raise ConfigError(f"{path!r} ({place}) has the parameters {signature}. {ACCEPTED_FORMS}")
    return RewardForm(batched, names, _is_async(function), place)


def _is_asked_for(parameter: inspect.Parameter) -> bool:
    """Whether it is given a value: those with a default are left alone, unless their name says what they want."""
    if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        return True
    known = {*SINGULAR, *(f"{name}s" for name in SINGULAR)}
    return parameter.default is parameter.empty or parameter.name in known


def _is_async(function: Callable[..., Any]) -> bool:
    kind: Any = type(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(kind.__call__)


def _place(function: Callable[..., Any]) -> str:
    plain: Any = inspect.unwrap(function)
    plain = getattr(plain, "func", plain)  # what a functools.partial calls
    kind: Any = type(plain)
    code = getattr(plain, "__code__", None) or getattr(kind.__call__, "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code else "no Python file"


def _import_error(path: str, module: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return (
            f"{path!r}: there is no module {error.name!r}. It is looked for in the current directory ({sys.path[-1]}) "
            "and among what is installed"
        )
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{path!r}: the import of {module!r} raised {type(error).__name__}: {error}{place}"

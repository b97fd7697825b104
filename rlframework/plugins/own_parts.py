"""A user's own parts that are no plugin: what an import path `module:name` names, and how a reward function is called.

The current directory is importable, as it is for `plugins:`. Everything wrong with a path is a `ConfigError` that says
what to write; nothing is called here but the module's own import.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlframework.errors import ConfigError
from rlframework.plugins.loading import make_current_directory_importable

SINGULAR = ("sample", "prompt", "completion", "answer")
"""What a reward function may ask for, by the names of its parameters; with an s behind each it gets all at once."""

ACCEPTED_FORMS = (
    "Accepted are functions, sync or async, of some of (samples, prompts, completions, answers), which return a list, "
    "or of some of (sample, prompt, completion, answer), which return one value; completions, or completion, among "
    "them. Such as `def score(samples, completions): ...` or `def score(prompt, completion, answer): ...`"
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
    by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
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
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))


def _place(function: Callable[..., Any]) -> str:
    plain: Any = inspect.unwrap(function)
    plain = getattr(plain, "func", plain)  # what a functools.partial calls
    code = getattr(plain, "__code__", None) or getattr(getattr(type(plain), "__call__", None), "__code__", None)
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

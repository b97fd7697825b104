"""`interfaces/backend_sdk.md` and `engine_sdk.md`: the names that training backends and generation engines import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from types import ModuleType

import griffe
from interface_pages import find_object, first_sentence, name_as_code
from pieces import page as page_of
from pieces import table

_TEXT = """`{module}` exports what a {part} imports of core, besides its configuration and its [record](records.md):
[write one](../{guide}). The names are versioned with [the plugin API](../plugins.md#versions). Bold rows are the
modules that define them."""


def pages() -> Mapping[str, Callable[[], str]]:
    """Return the functions that generate the two pages, by their paths below docs/."""
    return {
        "interfaces/backend_sdk.md": partial(page, "rlframework.engine", "training backend", "write_a_backend.md"),
        "interfaces/engine_sdk.md": partial(
            page, "rlframework.generation.sdk", "generation engine", "write_an_engine.md"
        ),
    }


def page(module: str, part: str, guide: str) -> str:
    """Return the page of the names that `module` exports for authors of a `part`, who start with the page `guide`."""
    text = _TEXT.format(module=module, part=part, guide=guide)
    return page_of(f"# Names for {part}s", text, table(("name", "meaning"), rows(import_module(module))))


def rows(sdk: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield a row for each exported name, after a row for the module that defines it."""
    names: dict[str, list[str]] = {}
    for name in sdk.__all__:
        names.setdefault(defining_module(sdk, name), []).append(name)
    for module, defined in sorted(names.items()):
        yield f"**`{module}`**", first_sentence(find_object(module))
        for name in sorted(defined, key=str.lower):
            if isinstance(getattr(sdk, name), ModuleType):
                yield f"`{name}`", "The module itself."
            else:
                described = find_object(f"{module}.{name}")
                yield name_as_code(described), first_sentence(described)


def defining_module(sdk: ModuleType, name: str) -> str:
    """Return the name of the module that defines `name`. Constants do not know theirs, so it is searched for."""
    value = getattr(sdk, name)
    if isinstance(value, ModuleType):
        return value.__name__
    module = getattr(value, "__module__", None) or ""
    if module.startswith("rlframework."):
        return module
    loaded = [each for each in sorted(sys.modules) if each.startswith("rlframework.")]
    [found] = [each for each in loaded if vars(sys.modules[each]).get(name) is value and _assigns(each, name)]
    return found


def _assigns(module: str, name: str) -> bool:
    """Whether the source of `module` assigns `name`, instead of importing it."""
    if hasattr(sys.modules[module], "__path__"):
        return False  # packages define no names, they may pass some on
    described = find_object(module)
    return isinstance(described, griffe.Module) and isinstance(described.members.get(name), griffe.Attribute)

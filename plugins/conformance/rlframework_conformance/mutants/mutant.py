"""`Mutant`: a deliberately broken part with one bug."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce, wraps
from importlib import import_module
from typing import Any, TypeVar

from rlframework.plugins.types import Capability, Record
from rlframework_conformance.layouts import Layout
from rlframework_conformance.measure import MutantNotApplicable

T = TypeVar("T")


@dataclass(frozen=True)
class Mutant:
    """A deliberate bug. `break_it(part_class)` returns the broken class, which a test of the suite must catch.

    `name` identifies the bug, and `bug` describes it in one sentence, as a changelog would. The bug shows in `layout`.
    `break_record` is for bugs in the plugin's record rather than in its class.
    """

    name: str
    bug: str
    break_it: Callable[[Any], Any]
    layout: Layout = field(default_factory=Layout)
    break_record: Callable[[Record], Record] = lambda record: record
    applies: Callable[[Mapping[str, Any]], bool] = lambda section: True
    """Whether the bug can occur in a part with this section. A missing file, for one, needs a part that reads files."""
    needs: frozenset[Capability] = frozenset()
    """Capabilities that the part must declare for the bug to occur, besides those of the layout and of tests."""


def mutant(
    name: str,
    bug: str,
    *,
    layout: Layout | None = None,
    break_record: Callable[[Record], Record] = lambda record: record,
    applies: Callable[[Mapping[str, Any]], bool] = lambda section: True,
    needs: frozenset[Capability] = frozenset(),
) -> Callable[[Callable[[Any], Any]], Mutant]:
    """Decorate `break_it` to make it a `Mutant`."""
    return lambda break_it: Mutant(name, bug, break_it, layout or Layout(), break_record, applies, needs)


def around(*methods: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[[Any], Any]]:
    """Decorate `change(call, part, ...)`, which runs in place of each of `methods` and gets its arguments.

    `call` is the sound method, bound to `part`:

        @mutant("shuffled_each_time", "Each call returns the samples in another order.")
        @around(Environment.samples)
        def _shuffled_each_time(call, environment, split):
            return random.sample(call(split), len(call(split)))

    The methods are of one class. In a policy worker it may also be that of its engine, of one of its services, or of an
    attribute of the engine: `part` is then the object of that class.
    """

    def decorate(change: Callable[..., Any]) -> Callable[[Any], Any]:
        def break_class(part: Any) -> Any:
            return _subclass(part, **{m.__name__: _override(part, m, change) for m in methods})

        def break_it(part: Any) -> Any:
            engine_class = getattr(part, "engine_class", None)
            if engine_class is None or issubclass(part, changed := _class_of(methods[0])):
                return break_class(part)
            if issubclass(engine_class, changed):
                return _subclass(part, engine_class=break_class(engine_class))
            return _with_broken_service(part, changed, break_class)

        return break_it

    return decorate


def result(method: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Break the result of `method`, which becomes `change(result)`."""
    return around(method)(lambda call, _, *args, **keywords: change(call(*args, **keywords)))


def entries(method: Callable[..., Any], change: Callable[[Any], Mapping[str, Any]]) -> Callable[[Any], Any]:
    """Break the dictionary that `method` returns: the entries of `change(result)` replace its own."""
    return result(method, lambda found: {**found, **change(found)})


def before(method: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Break what `method` finds: `change(part)` runs before it."""

    @around(method)
    def run(call: Any, part: Any, *args: Any, **keywords: Any) -> Any:
        change(part)
        return call(*args, **keywords)

    return run


def after(method: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Break what `method` leaves: `change(part)` runs after it."""

    @around(method)
    def run(call: Any, part: Any, *args: Any, **keywords: Any) -> Any:
        returned = call(*args, **keywords)
        change(part)
        return returned

    return run


def in_silence(method: Callable[..., Any], error: type[Exception]) -> Callable[[Any], Any]:
    """Break a failure: an `error` of `method` has no effect."""

    @around(method)
    def run(call: Any, _: Any, *args: Any, **keywords: Any) -> Any:
        with suppress(error):
            return call(*args, **keywords)

    return run


def without(method: Callable[..., Any], keyword: str) -> Callable[[Any], Any]:
    """Break a call: `method` does not get the argument `keyword`."""
    return around(method)(
        lambda call, _, *args, **keywords: call(*args, **{key: keywords[key] for key in keywords if key != keyword})
    )


def together(*changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the `break_it` that applies all `changes`, the first one innermost."""
    return lambda part: reduce(lambda broken, change: change(broken), changes, part)


def attribute_of(kind: type[T], *holders: Any) -> T:
    """Return the first attribute of the `holders` that is a `kind`; raise `MutantNotApplicable` if there is none."""
    for value in (value for holder in holders for value in vars(holder).values()):
        if isinstance(value, kind):
            return value
    raise MutantNotApplicable(
        f"it changes the {kind.__name__} among the attributes of the engine, and there is none: it says nothing about "
        "this backend"
    )


def _class_of(method: Callable[..., Any]) -> type:
    owner: type = reduce(getattr, method.__qualname__.split(".")[:-1], import_module(method.__module__))  # type: ignore[assignment]
    return owner


def _subclass(part: Any, **members: Any) -> Any:
    return type(part)(f"Broken{part.__name__}", (part,), members)


def _override(part: Any, method: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `change` with the method of `part`."""

    @wraps(getattr(part, method.__name__))
    def run(self: Any, *args: Any, **keywords: Any) -> Any:
        return change(getattr(part, method.__name__).__get__(self), self, *args, **keywords)

    return run


def _with_broken_service(worker_class: Any, changed: type, break_class: Callable[[Any], Any]) -> Any:
    """Return a policy worker's class that breaks the object of the class `changed` once its services are built."""

    def add_services(self: Any, *args: Any) -> None:
        worker_class._add_services(self, *args)
        service: Any = attribute_of(changed, self, self.training, self.engine)
        service.__class__ = break_class(type(service))

    return _subclass(worker_class, _add_services=add_services)

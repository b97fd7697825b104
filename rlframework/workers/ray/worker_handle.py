"""`WorkerHandle`: a handle of Ray to a `WorkerActor` that has the methods of the worker inside.

It is what Ray would give for the worker's own class (`handle.method.remote(...)`, `ray.kill(handle)`), without that
class being known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.actor import ActorHandle

from rlframework.workers.ray.transport import call_arguments
from rlframework.workers.ray.worker_actor import BARE
from rlframework.workers.ray.worker_class import Description


@dataclass(frozen=True)
class BoundMethod:
    """`handle.method`: call it with `remote`."""

    actor: Any
    name: str
    yields: bool
    chosen: Mapping[str, Any] = field(default_factory=dict)

    def options(self, **options: Any) -> BoundMethod:
        """The same method with options of Ray, such as `name` or `num_returns`."""
        return BoundMethod(self.actor, self.name, self.yields, {**self.chosen, **options})

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; an `ObjectRef`, or a generator of them where the method yields."""
        return self.send(True, [None] * len(args) + list(kwargs), *args, *kwargs.values())

    def send(self, wants_result: bool, names: Sequence[str | None], *values: Any) -> Any:
        """The same in the form in which `WorkerActor` takes it: one argument, and what is in Ray's store already."""
        method = self.actor.stream if self.yields else self.actor.call
        if self.chosen:
            method = method.options(**self.chosen)
        wanted = BARE if "num_returns" in self.chosen else wants_result
        return method.remote(*call_arguments(self.name, wanted, names, values))


class Carried:
    """A `WorkerHandle` on its way: where Ray unpickles this, it is one."""

    def __init__(self, actor: Any, described: Description) -> None:
        self._parts = (actor, described)

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerHandle, self._parts


class WorkerHandle(ActorHandle):  # type: ignore[type-arg]
    """The handle of one worker. The actor lives at least as long as it.

    It keeps the worker's methods wherever it is pickled. Ray itself pickles no handle that is an argument or a result
    of its own (`task.remote(handle)`): inside a list or a dictionary it does.
    """

    def __init__(self, actor: Any, described: Description) -> None:
        self.__dict__.update(actor.__dict__)
        self._rlframework_actor = actor
        self._rlframework_described = described

    def __getattr__(self, name: str) -> Any:
        described = self.__dict__.get("_rlframework_described")
        if described is not None and name in described.methods:
            method = described.methods[name]
            return BoundMethod(self._rlframework_actor, name, method.yields, method.options)
        if name.startswith("__ray_"):
            return super().__getattr__(name)
        raise AttributeError(f"the worker {described.name if described else ''} has no method {name!r}")

    def __del__(self) -> None:
        """The actor is counted by the handle inside."""

    def __repr__(self) -> str:
        return f"WorkerHandle({self._rlframework_described.name}, {self._actor_id.hex()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerHandle, (self._rlframework_actor, self._rlframework_described)

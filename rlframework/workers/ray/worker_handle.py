"""`WorkerHandle`: a Ray handle of a `WorkerActor` that exposes the methods of the worker inside.

It behaves like Ray's handle of the worker's own class (`handle.method.remote(...)`, `ray.kill(handle)`), but does not
need that class.
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
    """`handle.method`, called with `remote`."""

    actor: Any
    name: str
    yields: bool
    ray_options: Mapping[str, Any] = field(default_factory=dict)

    def options(self, **options: Any) -> BoundMethod:
        """The same method with additional Ray options, such as `name` or `num_returns`."""
        return BoundMethod(self.actor, self.name, self.yields, {**self.ray_options, **options})

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method; returns an `ObjectRef`, or a generator of them if the method yields."""
        return self.send(True, [None] * len(args) + list(kwargs), *args, *kwargs.values())

    def send(self, wants_result: bool, names: Sequence[str | None], *values: Any) -> Any:
        """Call the method with `names` and `values` of its arguments (name None: positional)."""
        method = self.actor.stream if self.yields else self.actor.call
        if self.ray_options:
            method = method.options(**self.ray_options)
        wanted = BARE if "num_returns" in self.ray_options else wants_result
        return method.remote(*call_arguments(self.name, wanted, names, values))


class PickledHandle:
    """Sends a `WorkerHandle` through Ray: unpickles as a `WorkerHandle`."""

    def __init__(self, actor: Any, described: Description) -> None:
        self._parts = (actor, described)

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerHandle, self._parts


class WorkerHandle(ActorHandle):  # type: ignore[type-arg]
    """The handle of one worker, which keeps the actor alive.

    Pickling preserves the worker's methods. Ray does not pickle a handle that is itself an argument or a result
    (`task.remote(handle)`); put it in a list or a dictionary instead.
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
        """Do nothing: the wrapped handle keeps the reference count of the actor."""

    def __repr__(self) -> str:
        return f"WorkerHandle({self._rlframework_described.name}, {self._actor_id.hex()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerHandle, (self._rlframework_actor, self._rlframework_described)

"""`RayWorkerBuilder` creates workers from an import path, and `WorkerHandle` calls one; neither imports their module.

Names and semantics follow NeMo-RL. A worker's options, in increasing order of precedence, come from its class's
`ray.remote`, the caller, its `configure_worker`, and its placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers import machine
from rlframework.workers.ray.transport import Packed
from rlframework.workers.ray.worker_actor import (
    BARE,
    AsyncWorkerActor,
    Configuration,
    Description,
    Method,
    WorkerActor,
    configuration,
    describe,
    find_class,
    split_path,
)


def recursive_merge_options(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge both dictionaries recursively into a new one; values of `above` take precedence."""
    merged = {
        key: recursive_merge_options(value, {}) if isinstance(value, Mapping) else value for key, value in below.items()
    }
    for key, value in above.items():
        if isinstance(value, Mapping):
            inner = merged.get(key)
            merged[key] = recursive_merge_options(inner if isinstance(inner, dict) else {}, value)
        else:
            merged[key] = value
    return merged


def worker_options(
    described: Description,
    asked: Mapping[str, Any],
    configured: Configuration,
    *,
    num_gpus: float,
    placement_group: PlacementGroup,
    bundle: int,
    capture_child_tasks: bool = True,
) -> dict[str, Any]:
    """The options with which Ray starts a worker. Leaves its arguments unchanged."""
    options: dict[str, Any] = {}
    wanted = recursive_merge_options({"env_vars": configured.environment}, configured.runtime_env)
    placed = {"num_gpus": num_gpus, **configured.resources}
    for above in (described.options, asked, {"runtime_env": wanted}, placed):
        options = recursive_merge_options(options, above)
    if "_nsight" in options["runtime_env"]:  # Ray renames `nsight` when it reads the options of a class
        options["runtime_env"]["nsight"] = options["runtime_env"].pop("_nsight")
    options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
        placement_group,
        placement_group_bundle_index=bundle,
        placement_group_capture_child_tasks=capture_child_tasks,
    )
    return options


def start_actor(options: Mapping[str, Any], *, is_async: bool) -> Any:
    """Start a `WorkerActor`; return Ray's handle without waiting."""
    return ray.remote(AsyncWorkerActor if is_async else WorkerActor).options(**options).remote()


def call_arguments(
    method_name: str, wants_result: bool | str, names: Sequence[str | None], values: Sequence[Any]
) -> tuple[Any, ...]:
    """The arguments with which to call a worker's actor: one packed `PackedCall`, then the values in Ray's store.

    Arguments are packed together because each argument costs Ray time; an `ObjectRef` must be a separate argument.
    """
    stored = {position: value for position, value in enumerate(values) if isinstance(value, ray.ObjectRef)}
    unstored = [None if position in stored else value for position, value in enumerate(values)]
    return Packed((method_name, wants_result, names, unstored, list(stored))), *stored.values()


def constructor_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of `WorkerActor.construct` after the first, for these arguments of the worker's constructor."""
    return call_arguments("__init__", False, [None] * len(args) + list(kwargs), [*args, *kwargs.values()])


@dataclass(frozen=True)
class BoundMethod:
    """`handle.method`, called with `remote`."""

    actor: Any
    name: str
    method: Method

    def options(self, **options: Any) -> BoundMethod:
        """The same method with additional Ray options, such as `name` or `num_returns`."""
        return replace(self, method=replace(self.method, options={**self.method.options, **options}))

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method; returns an `ObjectRef`, or a generator of them if the method yields."""
        return self.send(True, [None] * len(args) + list(kwargs), *args, *kwargs.values())

    def send(self, wants_result: bool, names: Sequence[str | None], *values: Any) -> Any:
        """Call the method with `names` and `values` of its arguments (name None: positional)."""
        method = self.actor.stream if self.method.yields else self.actor.call
        if self.method.options:
            method = method.options(**self.method.options)
        wanted = BARE if "num_returns" in self.method.options else wants_result
        return method.remote(*call_arguments(self.name, wanted, names, values))


class WorkerHandle(ActorHandle):  # type: ignore[type-arg]
    """The Ray handle of a worker, which keeps its `WorkerActor` alive and has the methods of the worker inside.

    It behaves like Ray's handle of the worker's own class (`handle.method.remote(...)`, `ray.kill(handle)`), but does
    not need that class.

    Pickling preserves the worker's methods. Ray does not pickle a handle that is itself an argument or a result
    (`task.remote(handle)`); put it in a list or a dictionary instead.
    """

    def __init__(self, actor: Any, described: Description) -> None:
        self.__dict__.update(actor.__dict__)
        self._rlframework = (actor, described)

    def __getattr__(self, name: str) -> Any:
        actor, described = self.__dict__.get("_rlframework", (None, Description("")))
        if name in described.methods:
            return BoundMethod(actor, name, described.methods[name])
        if name.startswith("__ray_"):
            return super().__getattr__(name)
        raise AttributeError(f"the worker {described.name} has no method {name!r}")

    def __del__(self) -> None:
        """Do nothing: the wrapped handle keeps the reference count of the actor."""

    def __repr__(self) -> str:
        return f"WorkerHandle({self._rlframework[1].name}, {self._actor_id.hex()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerHandle, self._rlframework


class RayWorkerBuilder:
    """How to create a worker: the import path of its class (`module:Class` or `module.Class`) and its arguments.

    The class is a plain class or one decorated with `ray.remote`. It may have a static or class method
    `configure_worker(num_gpus, bundle_indices)` that returns `(resources, env_vars, init_kwargs)`; if it also takes
    `num_gpus_per_node`, it may return a runtime environment as the fourth value.
    """

    class IsolatedWorkerInitializer:
        """Creates workers in their own Python environment. An actor; the workers it has created end with it."""

        def __init__(self, ray_actor_class_fqn: str, *init_args: Any, **init_kwargs: Any) -> None:
            self.ray_actor_class_fqn = ray_actor_class_fqn
            self.init_args = init_args
            self.init_kwargs = init_kwargs

        def create_worker(
            self,
            placement_group: PlacementGroup,
            placement_group_bundle_index: int,
            num_gpus: float,
            bundle_indices: tuple[int, list[int]] | None = None,
            num_gpus_per_node: int = 8,
            **extra_options: Any,
        ) -> Any:
            """Start a worker on its bundle; return its pickled handle. An error in its constructor fails every call."""
            plain, own_options = find_class(self.ray_actor_class_fqn)
            described = describe(plain, own_options)
            configured = configuration(plain, num_gpus, bundle_indices, num_gpus_per_node)
            options = worker_options(
                described,
                extra_options,
                configured,
                num_gpus=num_gpus,
                placement_group=placement_group,
                bundle=placement_group_bundle_index,
            )
            actor = start_actor(options, is_async=described.is_async)
            actor.load.remote(WorkerSpec(self.ray_actor_class_fqn, {}), {})
            call = constructor_call(self.init_args, self.init_kwargs)
            ray.wait([actor.construct.remote(dict(configured.init_kwargs), *call)])
            return Packed(WorkerHandle(actor, described))

    def __init__(self, ray_actor_class_fqn: str, *args: Any, **kwargs: Any) -> None:
        split_path(ray_actor_class_fqn)
        self.ray_actor_class_fqn = ray_actor_class_fqn
        self.args = args
        self.kwargs = kwargs
        self.spec = WorkerSpec(ray_actor_class_fqn, kwargs)
        self.passes_context = False

    @classmethod
    def from_spec(cls, spec: WorkerSpec) -> RayWorkerBuilder:
        """A builder for workers that get a `WorkerContext` and compare their plugins with the driver's."""
        builder = cls(spec.target, **spec.kwargs)
        builder.spec, builder.passes_context = spec, True
        return builder

    def create_worker_async(
        self,
        placement_group: PlacementGroup,
        placement_group_bundle_index: int,
        num_gpus: float,
        bundle_indices: tuple[int, list[int]] | None = None,
        **extra_options: Any,
    ) -> tuple[ray.ObjectRef[Any], ActorHandle[Any]]:
        """Start creating a worker; return a reference to its handle, and its initializer.

        The caller must keep the initializer for as long as the worker. `extra_options` are Ray options, with the
        worker's environment in `runtime_env` (`py_executable`, `env_vars`); they are not modified. The worker inherits
        that environment, and the variables of `machine.worker_environment`, from its initializer.
        """
        initializer: Any = (
            ray.remote(self.IsolatedWorkerInitializer)
            .options(
                num_cpus=0,
                runtime_env=recursive_merge_options(
                    {"env_vars": machine.worker_environment(1)}, extra_options.get("runtime_env") or {}
                ),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group, placement_group_bundle_index=placement_group_bundle_index
                ),
            )
            .remote(self.ray_actor_class_fqn, *self.args, **self.kwargs)
        )
        worker = initializer.create_worker.remote(
            placement_group, placement_group_bundle_index, num_gpus, bundle_indices, **extra_options
        )
        return worker, initializer

    def __call__(
        self,
        placement_group: PlacementGroup,
        placement_group_bundle_index: int,
        num_gpus: float,
        bundle_indices: tuple[int, list[int]] | None = None,
        **extra_options: Any,
    ) -> ActorHandle[Any]:
        """Create a worker and wait for its handle, which keeps the initializer alive."""
        created, initializer = self.create_worker_async(
            placement_group, placement_group_bundle_index, num_gpus, bundle_indices, **extra_options
        )
        worker: Any = ray.get(created)
        worker._RAY_INITIALIZER_ACTOR_REF_TO_AVOID_GC = initializer
        handle: ActorHandle[Any] = worker
        return handle

"""`RayWorkerBuilder` creates workers from an import path, and `WorkerHandle` calls one; neither imports their module.

Names and semantics follow NeMo-RL. A worker's options, in increasing order of precedence, come from its class's
`ray.remote`, the caller, its `configure_worker`, and its placement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers import machine
from rlframework_ray.transport import Packed, packed_call
from rlframework_ray.worker_actor import (
    BARE,
    NOTICES,
    AsyncWorkerActor,
    Configuration,
    Description,
    Method,
    WorkerActor,
    describe,
    find_class,
    split_path,
)


def recursive_merge_options(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge both dictionaries recursively into a new one; values of `above` take precedence."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping):
            inner = merged.get(key)
            merged[key] = recursive_merge_options(inner if isinstance(inner, Mapping) else {}, value)
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
        placement_group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=capture_child_tasks
    )
    return options


def start_actor(options: Mapping[str, Any], *, is_async: bool, notified: bool = False) -> Any:
    """Start a `WorkerActor`, which can be `notified` during a call; return Ray's handle without waiting."""
    actor_class: Any = AsyncWorkerActor if is_async else WorkerActor
    remote: Any = ray.remote
    if notified:  # only then, as Ray serves the calls of an actor with concurrency groups outside its main thread
        remote = ray.remote(concurrency_groups={NOTICES: 1})  # type: ignore[call-overload]
    return remote(actor_class).options(**options).remote()


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
        return self.prepare(True, *args, **kwargs)()

    def prepare(self, wants_result: bool, /, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """Pack the arguments; return a function that calls the method."""
        method = self.actor.stream if self.method.yields else self.actor.call
        if self.method.options:
            method = method.options(**self.method.options)
        wanted = BARE if "num_returns" in self.method.options else wants_result
        return packed_call(method, self.name, wanted, *args, **kwargs)


class WorkerHandle(ActorHandle):  # type: ignore[type-arg]
    """The Ray handle of a worker, which keeps its `WorkerActor` alive and has the methods of the worker inside.

    It behaves like Ray's handle of the worker's own class, but does not need that class. Pickling preserves the
    worker's methods. Ray does not pickle a handle that is itself an argument or a result (`task.remote(handle)`); put
    it in a list or a dictionary instead.
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
            """Start a worker on its bundle; return its pickled handle. Raises an error of the worker's constructor."""
            plain, own_options = find_class(self.ray_actor_class_fqn)
            known = {"num_gpus": num_gpus, "bundle_indices": bundle_indices, "num_gpus_per_node": num_gpus_per_node}
            described = describe(plain, own_options, [known])
            (configured,) = described.configured or [Configuration()]
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
            kwargs = {**self.init_kwargs, **configured.init_kwargs}
            ray.get(packed_call(actor.construct, *self.init_args, **kwargs)())
            return Packed(WorkerHandle(actor, described))

    def __init__(self, ray_actor_class_fqn: str, *args: Any, **kwargs: Any) -> None:
        split_path(ray_actor_class_fqn)
        self.ray_actor_class_fqn = ray_actor_class_fqn
        self.args = args
        self.kwargs = kwargs
        self.spec = WorkerSpec(ray_actor_class_fqn, {})
        self.passes_context = False

    @classmethod
    def from_spec(cls, spec: WorkerSpec) -> RayWorkerBuilder:
        """A builder for workers that get a `WorkerContext` and compare their plugins with the driver's."""
        builder = cls(spec.target, **spec.kwargs)
        builder.spec, builder.passes_context = replace(spec, kwargs={}), True
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
        place = (placement_group, placement_group_bundle_index)
        variables = {"env_vars": machine.worker_environment(1)}
        environment = recursive_merge_options(variables, extra_options.get("runtime_env") or {})
        there = PlacementGroupSchedulingStrategy(*place)
        actor_class = ray.remote(num_cpus=0, runtime_env=environment, scheduling_strategy=there)
        initializer: Any = actor_class(self.IsolatedWorkerInitializer).remote(
            self.ray_actor_class_fqn, *self.args, **self.kwargs
        )
        return initializer.create_worker.remote(*place, num_gpus, bundle_indices, **extra_options), initializer

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

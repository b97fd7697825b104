"""`RayWorkerBuilder`: creates workers from an import path, so that the driver never imports their module.

Names and semantics follow NeMo-RL. A worker's options, in increasing order of precedence, come from its class's
`ray.remote`, the caller, its `configure_worker`, and its placement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlframework.workers import machine
from rlframework.workers.ray.worker_actor import AsyncWorkerActor, WorkerActor
from rlframework.workers.ray.worker_class import Configuration, Description, configuration, describe, split_path

if TYPE_CHECKING:
    import ray
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup


def recursive_merge_options(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge both dictionaries recursively into a new one; values of `above` take precedence."""
    merged = {key: _copied(value) for key, value in below.items()}
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = recursive_merge_options(merged[key], value) if both else _copied(value)
    return merged


def worker_options(
    described: Description,
    asked: Mapping[str, Any],
    configured: Configuration,
    *,
    num_gpus: float,
    placement_group: PlacementGroup,
    bundle: int,
) -> dict[str, Any]:
    """The options with which Ray starts a worker. Leaves its arguments unchanged."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options = recursive_merge_options(described.options, asked)
    wanted = recursive_merge_options({"env_vars": configured.environment}, configured.runtime_env)
    options = recursive_merge_options(options, {"runtime_env": wanted})
    runtime_env = options["runtime_env"]
    if "_nsight" in runtime_env:  # Ray renames `nsight` when it reads the options of a class
        runtime_env["nsight"] = runtime_env.pop("_nsight")
    options = recursive_merge_options(options, {"num_gpus": num_gpus, **configured.resources})
    options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
        placement_group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=True
    )
    return options


def start_actor(options: Mapping[str, Any], *recipe: Any, is_async: bool) -> Any:
    """Start a `WorkerActor` with the constructor arguments `recipe`; return Ray's handle without waiting."""
    import ray

    return ray.remote(AsyncWorkerActor if is_async else WorkerActor).options(**options).remote(*recipe)


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
            from rlframework.workers.ray.worker_handle import PickledHandle

            path = self.ray_actor_class_fqn
            described = describe(path)
            configured = configuration(path, num_gpus, bundle_indices, num_gpus_per_node)
            options = worker_options(
                described,
                extra_options,
                configured,
                num_gpus=num_gpus,
                placement_group=placement_group,
                bundle=placement_group_bundle_index,
            )
            names = [None] * len(self.init_args) + list(self.init_kwargs)
            recipe = (path, dict(configured.init_kwargs), names, *self.init_args, *self.init_kwargs.values())
            actor = start_actor(options, *recipe, is_async=described.is_async)
            return PickledHandle(actor, described)

    def __init__(self, ray_actor_class_fqn: str, *args: Any, **kwargs: Any) -> None:
        split_path(ray_actor_class_fqn)
        self.ray_actor_class_fqn = ray_actor_class_fqn
        self.args = args
        self.kwargs = kwargs

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
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

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
        import ray

        created, initializer = self.create_worker_async(
            placement_group, placement_group_bundle_index, num_gpus, bundle_indices, **extra_options
        )
        worker: Any = ray.get(created)
        worker._RAY_INITIALIZER_ACTOR_REF_TO_AVOID_GC = initializer
        handle: ActorHandle[Any] = worker
        return handle


def _copied(value: Any) -> Any:
    """Copy `value`, with all mappings in it as plain dictionaries."""
    return {key: _copied(each) for key, each in value.items()} if isinstance(value, Mapping) else value

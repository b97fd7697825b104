"""Broken worker groups: start-up, the context of each worker, and shutdown.

Bugs inside workers, such as a wrong rank, start a subclass of the suite's worker that this module defines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlframework.base.errors import RLFrameworkError, WorkerError
from rlframework.config.sections import DeadlinesConfig
from rlframework.interfaces.worker_group import WorkerContext, WorkerGroup
from rlframework_conformance.mutants.mutant import around, mutant, result
from rlframework_conformance.mutants.worker_group import TWO
from rlframework_conformance.probe_worker import ProbeWorker


def _specs(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Break the start: workers are started as `change(spec)` says."""
    return around(WorkerGroup.__init__)(
        lambda start, _, spec, config, **keywords: start(change(spec), config, **keywords)
    )


def _launching(worker: type[ProbeWorker], **kwargs: Any) -> Callable[[Any], Any]:
    """Break the start: launch `worker`, a class of this module, with `kwargs` instead of the suite's `ProbeWorker`."""
    target = f"{__name__}:{worker.__name__}"
    return _specs(
        lambda spec: (
            replace(spec, target=target, kwargs={**spec.kwargs, **kwargs})
            if spec.target.endswith(":ProbeWorker")
            else spec
        )
    )


def _default_deadlines(config: Any) -> Any:
    return config.model_copy(update={"deadlines": DeadlinesConfig()})


class WrongContext(ProbeWorker):
    """A worker with `wrong` fields of its context."""

    def __init__(self, context: WorkerContext, wrong: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(replace(context, **wrong), **kwargs)


class OwnAddress(ProbeWorker):
    """Each worker gets a port of its own for the process group."""

    def __init__(self, context: WorkerContext, **kwargs: Any) -> None:
        super().__init__(replace(context, master_port=context.master_port + context.rank), **kwargs)


class SharedMemory(ProbeWorker):
    """Rank 0's write to a large argument reaches the other ranks, through a file, as with shared memory."""

    def spoil_in_turn(self, tensor: Any) -> float:
        """See `ProbeWorker`."""
        written = self._folder / "written"
        if self._context.rank and written.exists():
            tensor.zero_()
        total = super().spoil_in_turn(tensor)
        written.touch()
        return total


MUTANTS = (
    mutant(
        "one_memory_for_all_workers",
        "A worker's writes to a large argument are visible to the other workers.",
        layout=TWO,
    )(_launching(SharedMemory)),
    mutant("always_rank_0", "Every worker believes that it is rank 0.", layout=TWO)(
        _launching(WrongContext, wrong={"rank": 0})
    ),
    mutant("world_of_one", "Every worker believes that the world size is 1.", layout=TWO)(
        _launching(WrongContext, wrong={"world_size": 1})
    ),
    mutant("wrong_device", "Workers are assigned the wrong device.")(
        _launching(WrongContext, wrong={"device": "meta"})
    ),
    mutant("no_port", "No port is reserved for the process group.", layout=TWO)(
        _launching(WrongContext, wrong={"master_port": 0})
    ),
    mutant("addresses_differ", "Each worker gets a different address for the process group.", layout=TWO)(
        _launching(OwnAddress)
    ),
    mutant("constructor_arguments_lost", "Workers are constructed without their arguments.")(
        _specs(lambda spec: _without(spec, "word"))
    ),
    mutant("plugins_not_compared", "Workers do not compare their plugins with the driver's.", layout=TWO)(
        _specs(lambda spec: replace(spec, fingerprint=None))
    ),
    mutant("one_process_for_all", "All workers run in one process.", layout=TWO)(
        result(
            WorkerGroup.get_all_worker_results,
            lambda results: [one | {"pid": results[0]["pid"]} if isinstance(one, dict) else one for one in results],
        )
    ),
    mutant("always_in_peace", "Shutdown always reports success.", layout=TWO)(
        result(WorkerGroup.shutdown, lambda _: True)
    ),
)


@mutant("deadlines_ignored", "The configured deadlines are ignored.", layout=TWO)
@around(WorkerGroup.__init__)
def _deadlines_ignored(start: Any, _: Any, spec: Any, config: Any, **keywords: Any) -> None:
    start(spec, _default_deadlines(config), **keywords)


def _without(spec: Any, *names: str) -> Any:
    """Return `spec` without the arguments `names` of the constructor."""
    return replace(spec, kwargs={name: value for name, value in spec.kwargs.items() if name not in names})


@mutant("failed_start_tried_again", "A failed start is repeated without the argument that made it fail.")
@around(WorkerGroup.__init__)
def _failed_start_tried_again(start: Any, _: Any, spec: Any, config: Any, **keywords: Any) -> None:
    try:
        start(spec, config, **keywords)
    except WorkerError:
        start(_without(spec, "fail_rank"), config, **keywords)


@mutant("start_errors_lose_their_class", "A user error at start-up is raised as a WorkerError.", layout=TWO)
@around(WorkerGroup.__init__)
def _start_errors_lose_their_class(start: Any, _: Any, *args: Any, **keywords: Any) -> None:
    try:
        start(*args, **keywords)
    except RLFrameworkError as error:
        raise WorkerError(str(error)) from error


@mutant("left_after_a_failure", "Processes are left running after a failed call or start.", layout=TWO)
@around(WorkerGroup.__init__, WorkerGroup.shutdown)
def _left_after_a_failure(call: Any, group: Any, *args: Any, **keywords: Any) -> Any:
    """Start spare workers too, which only a clean shutdown ends."""
    if call.__name__ == "__init__":
        spec, config = args
        spare = _without(spec, *spec.kwargs.keys() - {"folder"})
        group.spare = type(group).__bases__[0](spare, _default_deadlines(config), **keywords)
    if (result := call(*args, **keywords)) is True:
        group.spare.shutdown()
    return result


@mutant("left_after_shutdown", "Shutdown runs the clean-up but leaves the processes running.")
@around(WorkerGroup.shutdown)
def _left_after_shutdown(shutdown: Any, group: Any, cleanup_method: str | None = None, timeout: Any = None) -> Any:
    if hasattr(group, "shut_down_once"):
        return shutdown(cleanup_method, timeout)
    group.shut_down_once = True
    if cleanup_method is not None:
        group.get_all_worker_results(group.run_all_workers_single_data(cleanup_method))
    return True


@mutant("no_clean_up", "Shutdown does not call the clean-up method.")
@around(WorkerGroup.shutdown)
def _no_clean_up(shutdown: Any, _: Any, cleanup_method: str | None = None, timeout: float | None = None) -> Any:
    return shutdown(None, timeout)


@mutant("second_shutdown_raises", "A second shutdown raises an error.")
@around(WorkerGroup.shutdown)
def _second_shutdown_raises(shutdown: Any, group: Any, *args: Any, **keywords: Any) -> Any:
    if hasattr(group, "shut_down_once"):
        raise WorkerError("the group is already shut down")
    group.shut_down_once = True
    return shutdown(*args, **keywords)


@mutant("shutdown_waits", "Shutdown ignores its timeout.", layout=TWO)
@around(WorkerGroup.shutdown)
def _shutdown_waits(shutdown: Any, _: Any, cleanup_method: str | None = None, timeout: float | None = None) -> Any:
    return shutdown(cleanup_method, 60.0)

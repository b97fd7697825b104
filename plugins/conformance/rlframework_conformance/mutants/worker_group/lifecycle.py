"""Broken worker groups: start-up, the context of each worker, and shutdown.

Bugs inside workers, such as a wrong rank, start a subclass of the suite's worker that this module defines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlframework.base.errors import RLFrameworkError, WorkerError
from rlframework.config.sections import DeadlinesConfig
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_conformance.mutants.mutant import Mutant
from rlframework_conformance.mutants.worker_group.replacements import TWO, Break, starting, with_methods, without
from rlframework_conformance.probe_worker import ProbeWorker


def launching(name: str) -> Break:
    """Break the start: launch the worker class `name` of this module instead of the suite's `ProbeWorker`."""
    target = f"{__name__}:{name}"
    return starting(
        lambda spec, config: (replace(spec, target=target) if spec.target.endswith(":ProbeWorker") else spec, config)
    )


def default_deadlines(config: Any) -> Any:
    """Return `config` with the default deadlines."""
    return config.model_copy(update={"deadlines": DeadlinesConfig()})


def _with_context(**changes: Any) -> type:
    class WrongContext(ProbeWorker):
        """A worker with a wrong context."""

        def __init__(self, context: WorkerContext, **kwargs: Any) -> None:
            super().__init__(replace(context, **changes), **kwargs)

    return WrongContext


AlwaysRank0 = _with_context(rank=0)
WorldSizeOne = _with_context(world_size=1)
WrongDevice = _with_context(device="meta")
NoPort = _with_context(master_port=0)


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


def one_process_id(part: Any) -> type:
    """All results report the process id of the first worker."""

    def get(self: Any, future: Any) -> list[Any]:
        results = part.get_all_worker_results(self, future)
        if isinstance(results[0], dict):
            results = [result | {"pid": results[0]["pid"]} for result in results]
        return list(results)

    return with_methods(part, get_all_worker_results=get)


def spare_workers(part: Any) -> type:
    """Start spare workers too, and leave them running if the start, a call or the clean-up fails."""

    def init(self: Any, spec: Any, config: Any, **given: Any) -> None:
        sound = {name: value for name, value in spec.kwargs.items() if name == "folder"}
        self.spare = part(replace(spec, kwargs=sound), default_deadlines(config), **given)
        part.__init__(self, spec, config, **given)

    def end(self: Any, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        clean = bool(part.shutdown(self, cleanup_method, timeout))
        if clean:
            self.spare.shutdown()
        return clean

    return with_methods(part, __init__=init, shutdown=end)


def left_running(part: Any) -> type:
    """The first shutdown cleans up but leaves the processes running."""

    def end(self: Any, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        if getattr(self, "shut_down_once", False):
            return bool(part.shutdown(self, cleanup_method, timeout))
        self.shut_down_once = True
        if cleanup_method is not None:
            self.get_all_worker_results(self.run_all_workers_single_data(cleanup_method))
        return True

    return with_methods(part, shutdown=end)


def broken_shutdown(change: Callable[..., Any]) -> Break:
    """Break `shutdown`: it returns `change(end, cleanup_method, timeout)`, where `end` is the sound one."""

    def break_it(part: Any) -> type:
        def end(self: Any, cleanup_method: str | None = None, timeout: float | None = None) -> Any:
            return change(lambda *args: part.shutdown(self, *args), cleanup_method, timeout)

        return with_methods(part, shutdown=end)

    return break_it


def second_shutdown_raises(part: Any) -> type:
    """A second shutdown raises."""

    def end(self: Any, cleanup_method: str | None = None, timeout: float | None = None) -> Any:
        if getattr(self, "shut_down_once", False):
            raise WorkerError("the group is already shut down")
        self.shut_down_once = True
        return part.shutdown(self, cleanup_method, timeout)

    return with_methods(part, shutdown=end)


def retried_start(part: Any) -> type:
    """Repeat a failed start without the argument that made it fail."""

    def init(self: Any, spec: Any, config: Any, **given: Any) -> None:
        try:
            part.__init__(self, spec, config, **given)
        except WorkerError:
            sound = {name: value for name, value in spec.kwargs.items() if name != "fail_rank"}
            part.__init__(self, replace(spec, kwargs=sound), config, **given)

    return with_methods(part, __init__=init)


def start_as_worker_error(part: Any) -> type:
    """Raise every error at the start as a WorkerError."""

    def init(self: Any, *args: Any, **given: Any) -> None:
        try:
            part.__init__(self, *args, **given)
        except RLFrameworkError as error:
            raise WorkerError(str(error)) from error

    return with_methods(part, __init__=init)


def always_successful(end: Callable[..., Any], cleanup_method: str | None, timeout: float | None) -> bool:
    """Shut down and report success."""
    end(cleanup_method, timeout)
    return True


MUTANTS = (
    Mutant(
        "one_memory_for_all_workers",
        "A worker's writes to a large argument are visible to the other workers.",
        ("test_workers_cannot_change_what_other_workers_got",),
        launching("SharedMemory"),
        TWO,
    ),
    Mutant(
        "deadlines_ignored",
        "The configured deadlines are ignored.",
        ("test_a_rank_that_hangs_meets_the_deadline", "test_starting_has_a_deadline"),
        starting(lambda spec, config: (spec, default_deadlines(config))),
        TWO,
    ),
    Mutant(
        "always_rank_0",
        "Every worker believes that it is rank 0.",
        ("test_every_worker_knows_who_it_is",),
        launching("AlwaysRank0"),
        TWO,
    ),
    Mutant(
        "world_of_one",
        "Every worker believes that the world size is 1.",
        ("test_every_worker_knows_who_it_is",),
        launching("WorldSizeOne"),
        TWO,
    ),
    Mutant(
        "wrong_device",
        "Workers are assigned the wrong device.",
        ("test_every_worker_knows_who_it_is",),
        launching("WrongDevice"),
    ),
    Mutant(
        "addresses_differ",
        "Each worker gets a different address for the process group.",
        ("test_every_worker_knows_who_it_is",),
        launching("OwnAddress"),
        TWO,
    ),
    Mutant(
        "constructor_arguments_lost",
        "Workers are constructed without their arguments.",
        ("test_every_worker_knows_who_it_is",),
        starting(lambda spec, config: (replace(spec, kwargs=without("word")(dict(spec.kwargs))), config)),
    ),
    Mutant(
        "no_port",
        "No port is reserved for the process group.",
        ("test_every_worker_has_a_process_of_its_own",),
        launching("NoPort"),
        TWO,
    ),
    Mutant(
        "one_process_for_all",
        "All workers run in one process.",
        ("test_every_worker_has_a_process_of_its_own",),
        one_process_id,
        TWO,
    ),
    Mutant(
        "failed_start_tried_again",
        "A failed start is repeated without the argument that made it fail.",
        ("test_a_constructor_that_raises_fails_the_start",),
        retried_start,
    ),
    Mutant(
        "start_errors_lose_their_class",
        "A user error at start-up is raised as a WorkerError.",
        ("test_a_class_that_is_not_there_fails_the_start", "test_other_plugins_there_than_here_are_refused"),
        start_as_worker_error,
        TWO,
    ),
    Mutant(
        "plugins_not_compared",
        "Workers do not compare their plugins with the driver's.",
        ("test_other_plugins_there_than_here_are_refused",),
        starting(lambda spec, config: (replace(spec, fingerprint=None), config)),
        TWO,
    ),
    Mutant(
        "left_after_a_failure",
        "Processes are left running after a failed call or start.",
        (
            "test_one_failing_rank_fails_the_call_at_once",
            "test_a_constructor_that_raises_fails_the_start",
            "test_shutdown_says_that_a_clean_up_failed",
            "test_shutdown_does_not_wait_for_ever",
        ),
        spare_workers,
        TWO,
    ),
    Mutant(
        "left_after_shutdown",
        "Shutdown runs the clean-up but leaves the processes running.",
        ("test_shutdown_cleans_up_and_ends_every_worker",),
        left_running,
    ),
    Mutant(
        "no_clean_up",
        "Shutdown does not call the clean-up method.",
        ("test_shutdown_cleans_up_and_ends_every_worker", "test_shutdown_says_that_a_clean_up_failed"),
        broken_shutdown(lambda end, cleanup_method, timeout: end(None, timeout)),
    ),
    Mutant(
        "second_shutdown_raises",
        "A second shutdown raises an error.",
        ("test_shutdown_cleans_up_and_ends_every_worker",),
        second_shutdown_raises,
    ),
    Mutant(
        "always_in_peace",
        "Shutdown always reports success.",
        ("test_shutdown_says_that_a_clean_up_failed", "test_shutdown_does_not_wait_for_ever"),
        broken_shutdown(always_successful),
        TWO,
    ),
    Mutant(
        "shutdown_waits",
        "Shutdown ignores its timeout.",
        ("test_shutdown_does_not_wait_for_ever",),
        broken_shutdown(lambda end, cleanup_method, timeout: end(cleanup_method, 60.0)),
        TWO,
    ),
)

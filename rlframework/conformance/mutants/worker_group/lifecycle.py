"""Broken worker groups: how workers start, what they know of themselves, and how they end.

What goes wrong inside workers, such as a wrong rank, is done by starting a subclass of the suite's worker, from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlframework.config.sections import DeadlinesConfig
from rlframework.conformance.mutants.mutant import Mutant
from rlframework.conformance.mutants.worker_group.base import TWO, Break, starting, with_methods, without
from rlframework.conformance.probe_worker import ProbeWorker
from rlframework.errors import RLFrameworkError, WorkerError
from rlframework.interfaces.worker_group import WorkerContext


def probe(name: str) -> Break:
    """A worker of this module is started where the suite's is asked for."""
    target = f"{__name__}:{name}"
    return starting(
        lambda spec, config: (replace(spec, target=target) if spec.target.endswith(":ProbeWorker") else spec, config)
    )


def deadlines(config: Any) -> Any:
    """A configuration with the deadlines that one has without any."""
    return config.model_copy(update={"deadlines": DeadlinesConfig()})


def _misinformed(**changes: Any) -> type:
    class Misinformed(ProbeWorker):
        """It is told something wrong about itself."""

        def __init__(self, context: WorkerContext, **kwargs: Any) -> None:
            super().__init__(replace(context, **changes), **kwargs)

    return Misinformed


AlwaysRank0 = _misinformed(rank=0)
AloneInTheWorld = _misinformed(world_size=1)
OnAnotherDevice = _misinformed(device="meta")
NoPort = _misinformed(master_port=0)


class OwnAddress(ProbeWorker):
    """Each thinks that it is the one that the others connect to."""

    def __init__(self, context: WorkerContext, **kwargs: Any) -> None:
        super().__init__(replace(context, master_port=context.master_port + context.rank), **kwargs)


class OneMemoryForAll(ProbeWorker):
    """What the first writes into a large argument reaches the others through a file, as shared memory would do it."""

    def spoil_in_turn(self, tensor: Any) -> float:
        """See `ProbeWorker`."""
        written = self._folder / "written"
        if self._context.rank and written.exists():
            tensor.zero_()
        total = super().spoil_in_turn(tensor)
        written.touch()
        return total


def one_process(part: Any) -> type:
    """All answers come from the first worker's process."""

    def get(self: Any, future: Any) -> list[Any]:
        results = part.get_all_worker_results(self, future)
        if isinstance(results[0], dict):
            results = [result | {"pid": results[0]["pid"]} for result in results]
        return list(results)

    return with_methods(part, get_all_worker_results=get)


def spare_workers(part: Any) -> type:
    """Spare workers are started too, and forgotten when a call or the start fails, or the clean-up does."""

    def init(self: Any, spec: Any, config: Any, **given: Any) -> None:
        sound = {name: value for name, value in spec.kwargs.items() if name == "folder"}
        self.spare = part(replace(spec, kwargs=sound), deadlines(config), **given)
        part.__init__(self, spec, config, **given)

    def end(self: Any, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        peaceful = bool(part.shutdown(self, cleanup_method, timeout))
        if peaceful:
            self.spare.shutdown()
        return peaceful

    return with_methods(part, __init__=init, shutdown=end)


def left_running(part: Any) -> type:
    """The first shutdown cleans up and leaves the processes to themselves."""

    def end(self: Any, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        if getattr(self, "asked_before", False):
            return bool(part.shutdown(self, cleanup_method, timeout))
        self.asked_before = True
        if cleanup_method is not None:
            self.get_all_worker_results(self.run_all_workers_single_data(cleanup_method))
        return True

    return with_methods(part, shutdown=end)


def ending(change: Callable[..., Any]) -> Break:
    """Shutting down gives what `change(end, cleanup_method, timeout)` gives, where `end` does it rightly."""

    def break_it(part: Any) -> type:
        def end(self: Any, cleanup_method: str | None = None, timeout: float | None = None) -> Any:
            return change(lambda *args: part.shutdown(self, *args), cleanup_method, timeout)

        return with_methods(part, shutdown=end)

    return break_it


def twice(part: Any) -> type:
    """A second shutdown is taken for a mistake."""

    def end(self: Any, cleanup_method: str | None = None, timeout: float | None = None) -> Any:
        if getattr(self, "ended_before", False):
            raise WorkerError("the group was shut down before")
        self.ended_before = True
        return part.shutdown(self, cleanup_method, timeout)

    return with_methods(part, shutdown=end)


def hopeful(part: Any) -> type:
    """A start that fails is tried again without what failed."""

    def init(self: Any, spec: Any, config: Any, **given: Any) -> None:
        try:
            part.__init__(self, spec, config, **given)
        except WorkerError:
            sound = {name: value for name, value in spec.kwargs.items() if name != "fail_rank"}
            part.__init__(self, replace(spec, kwargs=sound), config, **given)

    return with_methods(part, __init__=init)


def start_is_a_worker_error(part: Any) -> type:
    """What goes wrong at the start loses its class."""

    def init(self: Any, *args: Any, **given: Any) -> None:
        try:
            part.__init__(self, *args, **given)
        except RLFrameworkError as error:
            raise WorkerError(str(error)) from error

    return with_methods(part, __init__=init)


def always_true(end: Callable[..., Any], cleanup_method: str | None, timeout: float | None) -> bool:
    """Ends the group and says that all is well."""
    end(cleanup_method, timeout)
    return True


MUTANTS = (
    Mutant(
        "one_memory_for_all_workers",
        "what one worker writes into a large argument, the others see",
        ("test_workers_cannot_change_what_other_workers_got",),
        probe("OneMemoryForAll"),
        TWO,
    ),
    Mutant(
        "deadlines_ignored",
        "the deadlines of the configuration are not looked at",
        ("test_a_rank_that_hangs_meets_the_deadline", "test_starting_has_a_deadline"),
        starting(lambda spec, config: (spec, deadlines(config))),
        TWO,
    ),
    Mutant(
        "always_rank_0",
        "each is told that it is rank 0",
        ("test_every_worker_knows_who_it_is",),
        probe("AlwaysRank0"),
        TWO,
    ),
    Mutant(
        "world_of_one",
        "each thinks it is alone",
        ("test_every_worker_knows_who_it_is",),
        probe("AloneInTheWorld"),
        TWO,
    ),
    Mutant(
        "wrong_device",
        "a worker is told another device",
        ("test_every_worker_knows_who_it_is",),
        probe("OnAnotherDevice"),
    ),
    Mutant(
        "addresses_differ",
        "each is told an address of its own for the process group",
        ("test_every_worker_knows_who_it_is",),
        probe("OwnAddress"),
        TWO,
    ),
    Mutant(
        "constructor_arguments_lost",
        "workers are made without the arguments that were given",
        ("test_every_worker_knows_who_it_is",),
        starting(lambda spec, config: (replace(spec, kwargs=without("word")(dict(spec.kwargs))), config)),
    ),
    Mutant("no_port", "nobody reserves a port", ("test_every_worker_has_a_process_of_its_own",), probe("NoPort"), TWO),
    Mutant(
        "one_process_for_all",
        "all workers live in one process",
        ("test_every_worker_has_a_process_of_its_own",),
        one_process,
        TWO,
    ),
    Mutant(
        "failed_start_tried_again",
        "a worker that cannot be made is made without what failed",
        ("test_a_constructor_that_raises_fails_the_start",),
        hopeful,
    ),
    Mutant(
        "start_errors_lose_their_class",
        "a mistake of the user at the start is told as a failure of a worker",
        ("test_a_class_that_is_not_there_fails_the_start", "test_other_plugins_there_than_here_are_refused"),
        start_is_a_worker_error,
        TWO,
    ),
    Mutant(
        "plugins_not_compared",
        "workers do not compare their plugins with the driver's",
        ("test_other_plugins_there_than_here_are_refused",),
        starting(lambda spec, config: (replace(spec, fingerprint=None), config)),
        TWO,
    ),
    Mutant(
        "left_after_a_failure",
        "of the processes some are left when a call or a start fails",
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
        "shutting down cleans up and ends no process",
        ("test_shutdown_cleans_up_and_ends_every_worker",),
        left_running,
    ),
    Mutant(
        "no_clean_up",
        "shutting down does not call the clean-up",
        ("test_shutdown_cleans_up_and_ends_every_worker", "test_shutdown_says_that_a_clean_up_failed"),
        ending(lambda end, cleanup_method, timeout: end(None, timeout)),
    ),
    Mutant(
        "second_shutdown_raises",
        "shutting down twice is an error",
        ("test_shutdown_cleans_up_and_ends_every_worker",),
        twice,
    ),
    Mutant(
        "always_in_peace",
        "shutting down always says that all ended in peace",
        ("test_shutdown_says_that_a_clean_up_failed", "test_shutdown_does_not_wait_for_ever"),
        ending(always_true),
        TWO,
    ),
    Mutant(
        "shutdown_waits",
        "the timeout of shutdown is not looked at",
        ("test_shutdown_does_not_wait_for_ever",),
        ending(lambda end, cleanup_method, timeout: end(cleanup_method, 60.0)),
        TWO,
    ),
)

"""How worker groups are broken: each function takes a sound class and gives one that does one thing wrongly.

They work on any class that can have two workers. What goes wrong inside workers, such as a wrong rank, is done by
starting a subclass of the suite's worker, from here.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from rlframework.config.sections import DeadlinesConfig
from rlframework.conformance.suites.probe_worker import ProbeWorker
from rlframework.distributed.batched_data_dict import BatchedDataDict
from rlframework.errors import DeadlineExceeded, RLFrameworkError, WorkerError, WorkerLost
from rlframework.interfaces.worker_group import WorkerContext

Break = Callable[[type], type]


def _with(part: type, **methods: Any) -> type:
    """`part` with other methods."""
    return type(part)(f"Broken{part.__name__}", (part,), methods)


# -- what goes to the workers -----------------------------------------------------------------------------------------


def sharing(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Break:
    """Calls with shares are made with changed keywords; what is `None` among them is left out."""

    def break_it(part: Any) -> type:
        def run(self: Any, method_name: str, *args: Any, **given: Any) -> Any:
            return part.run_all_workers_sharded_data(self, method_name, *args, **change(given))

        return _with(part, run_all_workers_sharded_data=run)

    return break_it


def calling(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Break:
    """Calls of all workers are made with changed keywords."""

    def break_it(part: Any) -> type:
        def run(self: Any, method_name: str, *args: Any, **given: Any) -> Any:
            return part.run_all_workers_single_data(self, method_name, *args, **change(given))

        return _with(part, run_all_workers_single_data=run)

    return break_it


def giving_entries(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Break:
    """Calls with an entry for each worker are made with changed keywords."""

    def break_it(part: Any) -> type:
        def run(self: Any, method_name: str, *args: Any, **given: Any) -> Any:
            return part.run_all_workers_multiple_data(self, method_name, *args, **change(given))

        return _with(part, run_all_workers_multiple_data=run)

    return break_it


def backwards(value: Any) -> Any:
    """A list from its end."""
    return value[::-1] if isinstance(value, list) else value


def cut_to_two(value: Any) -> Any:
    """The first two entries of a list."""
    return value[:2] if isinstance(value, list) else value


def entries_for_all(given: dict[str, Any]) -> dict[str, Any]:
    """Nobody is skipped, and for whoever should have been there is another of the same."""
    if given.get("run_rank_0_only_axes") is None:
        return given
    return {name: value * 2 for name, value in given.items() if name == "value"}


def always_the_first(part: Any) -> type:
    """Worker 0 is called."""

    def run(self: Any, method_name: str, worker_idx: int, **given: Any) -> Any:
        return part.run_single_worker_single_data(self, method_name, 0 * worker_idx, **given)

    return _with(part, run_single_worker_single_data=run)


def all_for_one(part: Any) -> type:
    """All are called, and the answer of the one is returned."""

    def run(self: Any, method_name: str, worker_idx: int, **given: Any) -> Any:
        future = part.run_all_workers_single_data(self, method_name, **given)
        future.return_from_workers = [worker_idx]
        return future

    return _with(part, run_single_worker_single_data=run)


def wrapping_around(part: Any) -> type:
    """Python's indices."""

    def run(self: Any, method_name: str, worker_idx: int, *args: Any, **given: Any) -> Any:
        return part.run_single_worker_single_data(self, method_name, worker_idx % self.sharding.size, *args, **given)

    return _with(part, run_single_worker_single_data=run)


def starting(change: Callable[..., tuple[Any, Any]]) -> Break:
    """It is started with what `change(spec, config)` gives."""

    def break_it(part: Any) -> type:
        def init(self: Any, spec: Any, config: Any, **given: Any) -> None:
            part.__init__(self, *change(spec, config), **given)

        return _with(part, __init__=init)

    return break_it


def values(change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Keywords whose values are changed, one by one."""
    return lambda given: {name: change(value) for name, value in given.items()}


def without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Keywords without those of `names`."""
    return lambda given: {name: value for name, value in given.items() if name not in names}


def reversed_shares(given: dict[str, Any]) -> dict[str, Any]:
    """The shares backwards."""
    axes = given.get("in_sharded_axes")
    return {name: value[::-1] if axes and name in ("share", "value") else value for name, value in given.items()}


def cut_shares(given: dict[str, Any]) -> dict[str, Any]:
    """As many shares as there are workers are taken, whatever was given."""
    if isinstance(given.get("value"), list) and given["value"] and isinstance(given["value"][0], str):
        return given | {"value": given["value"][:2]}
    return given


def only_first_sharded_axis(given: dict[str, Any]) -> dict[str, Any]:
    """No axis is replicated."""
    return given | {"replicate_on_axes": []}


def plain(value: Any) -> Any:
    """A batch as a plain dictionary."""
    return dict(value) if isinstance(value, BatchedDataDict) else value


def cut_to_a_buffer(value: Any) -> Any:
    """The first million elements of a tensor."""
    if isinstance(value, list):
        return [cut_to_a_buffer(entry) for entry in value]
    return value[: 2**20] if isinstance(value, torch.Tensor) else value


def picklable(given: dict[str, Any]) -> dict[str, Any]:
    """What cannot be pickled becomes None."""
    kept = {}
    for name, value in given.items():
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001 - whatever it is, the bug is that it goes unnoticed
            value = None
        kept[name] = value
    return kept


def shared_memory(part: Any) -> type:
    """What the workers do to a tensor or a list shows in the driver."""

    def run(self: Any, method_name: str, **given: Any) -> Any:
        future = part.run_all_workers_single_data(self, method_name, **given)
        for value in given.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        return future

    return _with(part, run_all_workers_single_data=run)


def positional(part: Any) -> type:
    """A positional argument is taken for another one."""

    def single(self: Any, method_name: str, *args: Any, **given: Any) -> Any:
        return part.run_all_workers_single_data(self, method_name, **dict.fromkeys(["value"][: len(args)], 0), **given)

    return _with(part, run_all_workers_single_data=single)


# -- what comes back --------------------------------------------------------------------------------------------------


def awaiting(change: Callable[[Any, Callable[[], list[Any]]], list[Any]]) -> Break:
    """Results are what `change(group, wait)` gives, where `wait()` gives the right ones."""

    def break_it(part: Any) -> type:
        def get(self: Any, future: Any) -> list[Any]:
            return change(self, lambda: part.get_all_worker_results(self, future))

        return _with(part, get_all_worker_results=get)

    return break_it


def swallowed(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """None for the results of a call that failed."""
    try:
        return wait()
    except Exception:  # noqa: BLE001 - this is the bug
        return [None] * group.sharding.size


def first_line_only(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """A failure without the rest of its message."""
    try:
        return wait()
    except WorkerError as error:
        message = str(error).splitlines()[0]
    raise WorkerError(message)


def all_worker_errors(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """Errors without their class."""
    try:
        return wait()
    except RLFrameworkError as error:
        raise WorkerError(str(error)) from error


def wrong_rank(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """Failures of rank 1 are told as those of rank 0."""
    try:
        return wait()
    except RLFrameworkError as error:
        raise type(error)(str(error).replace("rank 1", "rank 0")) from None


def deaths_as_silence(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """A death is told as a deadline."""
    try:
        return wait()
    except WorkerError as error:
        if "died" in str(error):
            raise DeadlineExceeded("no answer from rank 1") from None
        raise


def deaths_as_failures(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """A death is told as any other failure."""
    try:
        return wait()
    except WorkerLost as error:
        raise WorkerError(str(error)) from None


def failures_as_deaths(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """What a worker raises is told as its death."""
    try:
        return wait()
    except WorkerError as error:
        raise WorkerLost(str(error)) from None


def one_slot(part: Any) -> type:
    """The answers of the last call, whichever future is awaited."""

    def single(self: Any, method_name: str, **given: Any) -> Any:
        self.last, self.results = part.run_all_workers_single_data(self, method_name, **given), None
        return self.last

    def get(self: Any, future: Any) -> list[Any]:
        if self.results is None:
            self.results = part.get_all_worker_results(self, self.last)
        return list(self.results)

    return _with(part, run_all_workers_single_data=single, get_all_worker_results=get)


def restarting(part: Any) -> type:
    """After a failure it starts new workers in silence."""

    def init(self: Any, *args: Any, **given: Any) -> None:
        self.begun = (args, given)
        part.__init__(self, *args, **given)

    def get(self: Any, future: Any) -> list[Any]:
        try:
            return list(part.get_all_worker_results(self, future))
        except WorkerError:
            part.__init__(self, *self.begun[0], **self.begun[1])
            raise

    return _with(part, __init__=init, get_all_worker_results=get)


# -- the lives of workers ---------------------------------------------------------------------------------------------


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

    return _with(part, get_all_worker_results=get)


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

    return _with(part, __init__=init, shutdown=end)


def left_running(part: Any) -> type:
    """The first shutdown cleans up and leaves the processes to themselves."""

    def end(self: Any, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        if getattr(self, "asked_before", False):
            return bool(part.shutdown(self, cleanup_method, timeout))
        self.asked_before = True
        if cleanup_method is not None:
            self.get_all_worker_results(self.run_all_workers_single_data(cleanup_method))
        return True

    return _with(part, shutdown=end)


def ending(change: Callable[..., Any]) -> Break:
    """Shutting down gives what `change(end, cleanup_method, timeout)` gives, where `end` does it rightly."""

    def break_it(part: Any) -> type:
        def end(self: Any, cleanup_method: str | None = None, timeout: float | None = None) -> Any:
            return change(lambda *args: part.shutdown(self, *args), cleanup_method, timeout)

        return _with(part, shutdown=end)

    return break_it


def twice(part: Any) -> type:
    """A second shutdown is taken for a mistake."""

    def end(self: Any, cleanup_method: str | None = None, timeout: float | None = None) -> Any:
        if getattr(self, "ended_before", False):
            raise WorkerError("the group was shut down before")
        self.ended_before = True
        return part.shutdown(self, cleanup_method, timeout)

    return _with(part, shutdown=end)


def hopeful(part: Any) -> type:
    """A start that fails is tried again without what failed."""

    def init(self: Any, spec: Any, config: Any, **given: Any) -> None:
        try:
            part.__init__(self, spec, config, **given)
        except WorkerError:
            sound = {name: value for name, value in spec.kwargs.items() if name != "fail_rank"}
            part.__init__(self, replace(spec, kwargs=sound), config, **given)

    return _with(part, __init__=init)


def start_is_a_worker_error(part: Any) -> type:
    """What goes wrong at the start loses its class."""

    def init(self: Any, *args: Any, **given: Any) -> None:
        try:
            part.__init__(self, *args, **given)
        except RLFrameworkError as error:
            raise WorkerError(str(error)) from error

    return _with(part, __init__=init)


def always_true(end: Callable[..., Any], cleanup_method: str | None, timeout: float | None) -> bool:
    """Ends the group and says that all is well."""
    end(cleanup_method, timeout)
    return True

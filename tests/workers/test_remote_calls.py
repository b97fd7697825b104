"""From a method of the driver's handle to the service that does the work: arguments, results and frames."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from rlframework.base.errors import RefitError, UserError
from rlframework.config.sections import WorkerGroupConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.policy_worker import Attempt, PolicyWorker
from rlframework.interfaces.worker_group import WorkerSpec, sharded
from rlframework.workers.dispatch import InlineWorkerGroup
from rlframework.workers.remote_calls import WorkerCalls, of_service, remote


class Interface:
    """The methods of the worker."""

    def add(self, x: int, y: int = 1) -> int:
        """Add."""

    @sharded
    def double(self, data: list[int], *, by: int = 2) -> list[int]:
        """Multiply each."""


class Arithmetic:
    """The service."""

    def plus(self, x: int, y: int = 1) -> int:
        return x + y

    def double(self, data: list[int], *, by: int = 2) -> list[int]:
        self.frames = [line.partition(" in ")[2].partition("\n")[0] for line in traceback.format_stack()[-5:]]
        return [by * each for each in data]


class Worker(Interface):
    """The worker."""

    def __init__(self, context: Any) -> None:
        self.arithmetic = Arithmetic()

    add = of_service("arithmetic", Arithmetic.plus)
    double = of_service("arithmetic", Arithmetic.double)


class Handle:
    """The driver's handle, which sorts rows before it shards them."""

    def __init__(self) -> None:
        sharding = NamedSharding([[0]], ["data_parallel", "tensor_parallel"])
        spec, config = WorkerSpec(f"{__name__}:Worker", {}), WorkerGroupConfig(name="inline")
        self.group = InlineWorkerGroup(spec, config, sharding=sharding, device="cpu")
        self._calls = WorkerCalls(self.group)

    add = remote(Interface.add)
    total = remote(Interface.add, sum)
    double = remote(Interface.double, lambda shards: shards[0])

    def _split(self, method: Any, data: list[int], options: dict[str, Any]) -> Any:
        self.options = method, options
        return [sorted(data)], lambda rows: [rows[sorted(data).index(each)] for each in data]


@pytest.fixture
def handle() -> Handle:
    return Handle()


def test_results_are_by_rank_or_combined(handle):
    assert handle.add(2, y=3) == [5]
    assert handle.add(2) == [3]
    assert handle.total(2, 3) == 5
    assert handle.add.__doc__ == Interface.add.__doc__


def test_arguments_that_the_interface_does_not_have_reach_no_worker(handle):
    for wrong in (lambda: handle.add(), lambda: handle.add(1, 2, 3), lambda: handle.add(1, z=2)):
        with pytest.raises(TypeError, match="argument"):
            wrong()


def test_a_sharded_method_is_split_and_restored(handle):
    assert handle.double([3, 1, 2]) == [6, 2, 4]
    assert handle.options == (Interface.double, {"by": 2})
    assert handle.double([3, 1], by=5) == [15, 5]


def test_a_call_has_no_frames_but_those_of_handle_and_group(handle):
    handle.double([1])
    frames = handle.group._worker.arithmetic.frames
    assert frames == ["call", "on_shards", "run_all_workers_sharded_data", "_run", "double"]


def test_the_method_of_a_worker_is_what_the_service_has_now():
    class Louder(Worker):
        def add(self, *args: int) -> int:
            return 10 * super().add(*args)

    worker = Louder(None)
    assert worker.add(1) == 20
    worker.arithmetic.plus = lambda x: -x
    assert worker.add(1) == -10


@pytest.mark.parametrize("kind", [RefitError, UserError])
def test_an_attempt_returns_what_a_refit_may_fail_with(kind):
    class Sending:
        attempt = PolicyWorker.attempt

        def send(self, fails: bool) -> str:
            if fails:
                raise kind("no memory")
            return "sent"

    assert Sending().attempt("send", {"fails": False}) == Attempt("sent")
    assert Sending().attempt("send", {"fails": True}) == Attempt(None, "no memory", kind is UserError)
    with pytest.raises(AttributeError):
        Sending().attempt("receive", {})

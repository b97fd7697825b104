from __future__ import annotations

import pickle
import sys
import threading
import types

import pytest

from rlframework.base.errors import (
    BatchError,
    BatchKeyError,
    NonFiniteGradients,
    RLFrameworkError,
    UserError,
    WorkerError,
    WorkerLost,
)
from rlframework.workers.failures import HostFailure, as_exception, list_ranks, root_cause, unsendable_variable


def failure_of(error):
    try:
        raise error
    except type(error) as caught:
        return pickle.loads(pickle.dumps(HostFailure.of(caught)))  # noqa: S301 - just written here


def test_other_errors_become_worker_errors_with_rank_and_traceback():
    error = as_exception({1: failure_of(ZeroDivisionError("by zero"))}, 2, "train")
    assert type(error) is WorkerError
    assert str(error).startswith("rank 1 of 2 failed in train: ZeroDivisionError: by zero\n")
    assert "in failure_of" in str(error)


@pytest.mark.parametrize("kind", [UserError, BatchError, BatchKeyError, NonFiniteGradients])
def test_rlframework_errors_keep_class_and_message(kind):
    given = kind("no such thing")
    given.add_note("look there")
    error = as_exception({1: failure_of(given)}, 2, "train")
    assert type(error) is kind
    assert str(error) == "no such thing\nlook there"
    assert error.__notes__ == ["raised by rank 1 of 2 in train"]
    assert isinstance(error.__cause__, WorkerError)
    assert "in failure_of" in str(error.__cause__)


def test_a_class_unknown_to_the_driver_becomes_its_nearest_base(monkeypatch):
    module = types.ModuleType("only_in_the_worker")
    kind = type("Special", (BatchError,), {"__module__": "only_in_the_worker"})
    module.Special = kind
    monkeypatch.setitem(sys.modules, "only_in_the_worker", module)
    failure = failure_of(kind("odd"))
    assert type(as_exception({0: failure}, 1, "train")) is kind
    monkeypatch.delitem(sys.modules, "only_in_the_worker")
    assert type(as_exception({0: failure}, 1, "train")) is BatchError
    assert "only_in_the_worker" not in sys.modules


def test_a_class_with_its_own_constructor_is_preserved(monkeypatch):
    class Picky(RLFrameworkError):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    monkeypatch.setattr(sys.modules[__name__], "Picky", Picky, raising=False)
    Picky.__qualname__ = "Picky"
    error = as_exception({0: failure_of(Picky(1, 2))}, 1, "train")
    assert type(error) is Picky
    assert str(error) == "1 and 2"


def test_a_dead_process_is_the_root_cause_before_its_consequences():
    echo = failure_of(RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4"))
    real = failure_of(ValueError("the cause"))
    dead = HostFailure((), "gone", "", died=True)
    assert root_cause({0: echo, 1: real}) == 1
    assert root_cause({0: real, 1: echo}) == 0
    assert root_cause({0: real, 1: echo, 2: dead}) == 2
    assert root_cause({2: real, 1: real}) == 1
    assert root_cause({3: echo}) == 3


def test_other_failed_ranks_are_named():
    failures = {rank: failure_of(ValueError(f"on {rank}")) for rank in (2, 0, 3)}
    message = str(as_exception(failures, 4, "train"))
    assert message.startswith("rank 0 of 4 failed in train: ValueError: on 0\n(also failed: rank 2, 3)")
    error = as_exception({1: HostFailure((), "was killed", "", died=True)}, 2, "train")
    assert type(error) is WorkerLost
    assert str(error) == "the process of rank 1 of 2 died in train: was killed"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"), WorkerLost),
        (RuntimeError("gloo cannot do this with that type"), WorkerError),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv"), WorkerError),
        (ConnectionRefusedError("Connection refused: the user's own server is down"), WorkerError),
    ],
)
def test_a_broken_connection_between_workers_means_a_lost_worker(error, kind):
    """The workers of a lost machine cannot report its loss; only their peers can."""
    assert type(as_exception({0: failure_of(error)}, 2, "train")) is kind
    if kind is WorkerLost:  # but a worker's own error is the cause, not a lost worker
        both = {0: failure_of(error), 1: failure_of(ZeroDivisionError("by zero"))}
        assert type(as_exception(both, 2, "train")) is WorkerError


def test_a_message_about_thousands_of_ranks_lists_the_first():
    assert list_ranks([3, 5]) == "3, 5"
    assert list_ranks([]) == ""
    assert list_ranks(range(4096)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 4080 more"


def test_what_cannot_be_sent_is_named_and_not_what_holds_it():
    lock = threading.Lock()

    def inner():
        return lock

    class Base:
        def __init__(self, held):
            self.fine, self.held = 1, held

    class Loss(Base):
        def __init__(self, held):
            super().__init__(held)

        def __call__(self):
            return inner()

    assert unsendable_variable(Loss(lock)) == ". Loss has the attribute 'held', a lock"
    assert unsendable_variable({"loss_fn": Loss(1)}).endswith("inner uses the variable 'lock', a lock")

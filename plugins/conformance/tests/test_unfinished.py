"""A method that is not implemented yet is named, with its place, whichever process it raised in."""

from __future__ import annotations

import pytest

from rlframework.base.errors import NotSupported, WorkerError
from rlframework.workers.failures import HostFailure, as_exception
from rlframework_conformance.measure import not_written


def error_of(call):
    with pytest.raises((NotImplementedError, ValueError)) as found:
        call()
    return found.value


def unfinished():
    raise NotImplementedError("build: load the model")


def without_message():
    raise NotImplementedError


@pytest.mark.parametrize(
    ("where", "doing"),
    [
        ("", "build"),
        ("", "constructing rlframework_conformance.inspected_worker:Inspected"),
        (" on node fe80::1", "build"),
    ],
)
@pytest.mark.parametrize(
    ("method", "message"), [(unfinished, "build: load the model"), (without_message, "without_message")]
)
def test_an_unfinished_method_is_named_with_its_place(where, doing, method, message):
    line = method.__code__.co_firstlineno + 1
    text = f"NotImplementedError: {message}\n  in        {__file__}:{line}, {method.__name__}"
    error = error_of(method)
    assert not_written(error) == text
    sent = as_exception({0: HostFailure.of(error)}, 2, doing, lambda rank: where)
    assert type(sent) is WorkerError
    assert not_written(sent) == text


def test_other_errors_are_not_unfinished_methods():
    def refused():
        raise NotSupported("adapters")

    def wrong():
        raise ValueError("NotImplementedError: no")

    for error in map(error_of, (refused, wrong)):
        assert not_written(error) == ""
        assert not_written(as_exception({0: HostFailure.of(error)}, 2, "build")) == ""

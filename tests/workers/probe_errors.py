"""Errors raised by the probe worker, in a module of their own that the driver does not import."""

from rlframework.base.errors import BatchError


class Plain(RuntimeError):
    pass


class Special(BatchError):
    """A class unknown to the driver, which gets its nearest known base class instead."""

    def __init__(self, message, more=1):
        super().__init__(message)

"""Errors that the probe worker raises; in a module of their own, which the driver does not import."""

from rlframework.errors import BatchError, NonFiniteGradients


class Plain(RuntimeError):
    pass


class Special(BatchError):
    """A class that the driver does not know: it comes back as the nearest one that it knows."""

    def __init__(self, message, more=1):
        super().__init__(message)


__all__ = ["BatchError", "NonFiniteGradients", "Plain", "Special"]

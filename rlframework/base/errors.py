"""All errors that rlframework raises intentionally.

`UserError` and its subclasses report mistakes in the input (configuration, data, arguments): the command line prints
them without a traceback and exits with code 2. All other errors are failures at run time and exit with code 1.
"""

from rlframework.base.notebook_tracebacks import ShortInNotebooks


class RLFrameworkError(ShortInNotebooks, Exception):
    """Base class of all errors raised intentionally by rlframework and its plugins."""


class UserError(RLFrameworkError):
    """The input is invalid. The message says what was given, what is allowed and what to do."""


class ConfigError(UserError):
    """The configuration is invalid: an unknown key, a bad value, or a combination that the backend does not support."""


class DataError(UserError):
    """A dataset or model directory cannot be used. The message names the file and, if possible, the line."""


class ImageError(DataError):
    """An image of a row cannot be used, or the row has another number of images than places for them."""


class BatchError(UserError, ValueError, AssertionError):
    """A batch has the wrong shape, size or keys. Also an `AssertionError`, for code written for NeMo-RL."""


class BatchKeyError(BatchError, KeyError):
    """A batch lacks a required key."""

    __str__ = Exception.__str__  # KeyError would print the repr of the message


class BatchTypeError(BatchError, TypeError, NotImplementedError):
    """A value of a batch is neither a tensor with rows in dimension 0 nor a list with one element per row."""


class UnpicklableError(UserError, TypeError):
    """A value, such as a loss, cannot be sent to worker processes."""


class PluginError(UserError):
    """A plugin is unknown, broken, duplicated, or incompatible. The message names the distributions responsible."""


class NotSupported(UserError, NotImplementedError):
    """The chosen backend does not declare the capability that this call needs."""


class UnsupportedConfig(ConfigError, NotSupported):
    """The configuration asks for a capability that the chosen backend does not declare."""


class RunInterrupted(ShortInNotebooks, KeyboardInterrupt):
    """A run stopped on `signal` after saving `checkpoint`; `resume` is the command that resumes it."""

    def __init__(self, signal: int, resume: str, checkpoint: object) -> None:
        super().__init__(f"interrupted; the checkpoint is in {checkpoint}. To resume: {resume}")
        self.exit_code = 128 + int(signal)


class RunTerminated(ShortInNotebooks, KeyboardInterrupt):
    """A run stopped on `signal` without saving a checkpoint: there was nothing to save, or saving failed."""

    def __init__(self, message: str = "terminated", signal: int = 15) -> None:
        super().__init__(message)
        self.exit_code = 128 + int(signal)


class WriteError(RLFrameworkError):
    """A file cannot be written: the disk is full or read-only, a permission or folder is gone. The message names it."""


class WorkerError(RLFrameworkError):
    """A worker failed; the message has its rank and its traceback."""


class WorkerLost(WorkerError):
    """A worker was lost: its process died or its machine disappeared. New workers can redo the work."""


class DeadlineExceeded(RLFrameworkError, TimeoutError):
    """A wait timed out; the message says what was awaited and what had arrived."""


class RequestError(UserError):
    """A generation request that the engine cannot serve."""


class EngineNotReady(UserError):
    """A generation engine was asked to serve requests without usable weights."""


class EngineFault(RLFrameworkError):
    """A generation engine returned what it must not return. The message names the engine, the request and the fault."""


class SamplingMismatch(RLFrameworkError):
    """Sampled tokens are not what the policy would have sampled: the log-probabilities of engine and trainer differ."""


class RefitError(RLFrameworkError):
    """A generation engine did not receive the trainer's exact weights; it refuses to generate until it does."""


class EngineLost(RefitError, WorkerLost):
    """A generation engine was lost during a refit, or did not answer. The next refit replaces it."""


class RefitNotPrepared(UserError, AssertionError):
    """A refit method was called before its preparation. Also an `AssertionError`, for code written for NeMo-RL."""


class LedgerError(RLFrameworkError):
    """A ticket of asynchronous training was used against the rules of its ledger. The message names the ticket."""


class NonFiniteGradients(RLFrameworkError):
    """Gradients were not finite for `policy.non_finite_gradients.stop_after` consecutive steps."""

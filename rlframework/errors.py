"""Every error that rlframework raises on purpose.

`UserError` and its children are mistakes in what was given (configuration, data, arguments): the command line prints
them without a traceback and exits with code 2. The others are failures of the machinery and exit with code 1.
"""


class RLFrameworkError(Exception):
    """Base of all errors raised on purpose by rlframework and its plugins."""


class UserError(RLFrameworkError):
    """Something that was given is wrong. The message says what was given, what is allowed and what to do."""


class ConfigError(UserError):
    """The configuration is wrong: an unknown key, a bad value, a combination that the backend cannot do."""


class DataError(UserError):
    """A data set or a model directory cannot be used; names the file and, where there is one, the line."""


class BatchError(UserError, ValueError, AssertionError):
    """A batch has the wrong shape, size or keys. An `AssertionError` too, for code that was written for NeMo-RL."""


class BatchKeyError(BatchError, KeyError):
    """A batch lacks a key that it must have."""

    __str__ = Exception.__str__  # KeyError's own would print the message's repr


class BatchTypeError(BatchError, TypeError, NotImplementedError):
    """A value of a batch is neither a tensor with rows on dimension 0 nor a list with one element a row."""


class PluginError(UserError):
    """A plugin is unknown, broken, there twice, or made for another plugin API. Names the distributions to blame."""


class NotSupported(UserError, NotImplementedError):
    """The chosen backend does not declare the capability that this call needs."""


class UnsupportedConfig(ConfigError, NotSupported):
    """The configuration asks for a capability that the chosen backend does not declare."""


class RunInterrupted(KeyboardInterrupt):
    """A run was told to stop by `signal`, and has; `resume` is the command that goes on from `checkpoint`."""

    def __init__(self, signal: int, resume: str, checkpoint: object) -> None:
        super().__init__(f"interrupted; a checkpoint lies in {checkpoint}. To go on: {resume}")
        self.exit_code = 128 + int(signal)


class RunTerminated(KeyboardInterrupt):
    """A run was told to stop by `signal` where there was nothing to save, or it could not be saved."""

    def __init__(self, message: str = "terminated", signal: int = 15) -> None:
        super().__init__(message)
        self.exit_code = 128 + int(signal)


class WorkerError(RLFrameworkError):
    """A worker failed; the message carries its rank and its own traceback."""


class WorkerLost(WorkerError):
    """A worker is gone: its process died or its machine left. New workers can do the work again."""


class DeadlineExceeded(RLFrameworkError, TimeoutError):
    """A wait reached its deadline; the message says what was waited for and what was there."""


class RefitError(RLFrameworkError):
    """Weights did not arrive at a generation engine as the trainer has them; it refuses to generate until they do."""


class RefitNotPrepared(UserError, AssertionError):
    """A call of a refit came before the one that prepares it. An `AssertionError` for code made for NeMo-RL."""


class NonFiniteGradients(RLFrameworkError):
    """The gradient was not finite for more consecutive steps than `policy.non_finite_gradients.stop_after` allows."""

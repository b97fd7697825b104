"""Failures of an implementation that is not finished yet: the `NotImplementedError`s of its methods."""

from __future__ import annotations

import re
import traceback

from rlframework.base.errors import WorkerError

NOT_WRITTEN = re.compile(r"NotImplementedError: (.+)(\n  in        .+)?")
"""Finds what is not implemented, and the line with its place, in the text of an error."""
_TO_CLASS = r"(?:[^:\n]|:(?! ))+"  # a colon belongs to it if no space follows: `module:Class`, `fe80::1`
_OF_WORKER = re.compile(rf"{_TO_CLASS} failed in {_TO_CLASS}: NotImplementedError: ")
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (\w+)', re.MULTILINE)


def not_written(error: BaseException) -> str:
    """Return what is not implemented yet, if `error` is a `NotImplementedError` of this process or of a worker.

    `NotSupported`, which says that something will not be, is another class. The place in the code is appended; an error
    without a message is named after the function.
    """
    if type(error) is NotImplementedError:
        text = "".join(traceback.format_exception(error))
    elif isinstance(error, WorkerError) and _OF_WORKER.match(str(error)):
        text = str(error)
    else:
        return ""
    file, line, function = _FRAME.findall(text)[-1]
    what = [found[1] for found in NOT_WRITTEN.finditer(text)] or [function]
    return f"NotImplementedError: {what[-1]}\n  in        {file}:{line}, {function}"

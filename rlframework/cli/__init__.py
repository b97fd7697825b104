"""The command line. Each command parses its arguments and calls into another package; heavy imports are deferred.

`common` has the application, shared options and error handling, `commands` core's commands; plugins add others.

Exit codes: 0 for success; 2 for a user error (`UserError`, or bad arguments); 1 for any other failure,
and where a check finds that something is not as it must be; 130 for Ctrl-C.
"""

from rlframework.cli import commands  # noqa: F401 - they register themselves with `app`
from rlframework.cli.common import app, main

__all__ = ["app", "main"]

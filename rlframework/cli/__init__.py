"""The command line: each command calls into a room. Nothing heavy is imported before a command runs.

`common` has what commands share: options, and how errors end. The commands lie by what they are for: `jobs` start,
ask and rewrite, `looking` changes nothing, `proving` is for the authors of parts.

Exit codes: 0; 2 for a mistake in what was given (`UserError`, or bad arguments); 1 for any other failure; 130 for
Ctrl-C.
"""

from rlframework.cli import jobs, looking, proving  # noqa: F401 - they put their commands into `app`
from rlframework.cli.common import app, main

__all__ = ["app", "main"]

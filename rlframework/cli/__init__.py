"""The command line: each command parses its arguments and calls into another package; heavy imports wait for a command.

`common` has the application, shared options and error handling. The commands are grouped by purpose: `train` (train,
convert, tokenize), `evaluate` (evaluate, generate), `inspect` (config, schema, plugins, doctor, report) and `develop`
(conformance, parity, new-backend).

Exit codes: 0; 2 for a user's mistake (`UserError`, or bad arguments); 1 for any other failure; 130 for Ctrl-C.
"""

from rlframework.cli import develop, evaluate, inspect, train  # noqa: F401 - they add their commands to `app`
from rlframework.cli.common import app, main

__all__ = ["app", "main"]

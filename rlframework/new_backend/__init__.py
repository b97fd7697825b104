"""`rlframework new-backend NAME`: a plugin distribution to fill in, which installs and is listed at once.

Left out: other kinds of parts (`examples/plugins/` has one of each), and publishing.
"""

from __future__ import annotations

from rlframework.new_backend.writing import next_commands, write_backend

__all__ = ["next_commands", "write_backend"]

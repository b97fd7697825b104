"""`rlframework new-backend NAME`: creates a plugin distribution to fill in, which is installable right away.

Not supported: other kinds of plugins (`examples/plugins/` has one of each), and publishing.
"""

from __future__ import annotations

from rlframework.new_backend.writing import next_commands, write_backend

__all__ = ["next_commands", "write_backend"]

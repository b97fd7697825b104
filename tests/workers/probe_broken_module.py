"""A module of a worker that cannot be imported."""

raise RuntimeError("this module is broken on purpose")

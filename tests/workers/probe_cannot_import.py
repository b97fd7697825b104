"""A module of a worker that cannot be imported."""

import a_module_that_is_nowhere  # noqa: F401

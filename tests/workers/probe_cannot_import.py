"""A worker's module that cannot be imported."""

import a_module_that_is_nowhere  # noqa: F401

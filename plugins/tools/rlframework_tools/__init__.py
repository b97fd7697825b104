"""Commands around runs: `doctor`, the estimates of a run before it starts, and templates for plugin authors."""

__version__ = "0.2.0"

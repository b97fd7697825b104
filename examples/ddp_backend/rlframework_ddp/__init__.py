"""The training backend `ddp` for rlframework."""

__version__ = "0.1.0"

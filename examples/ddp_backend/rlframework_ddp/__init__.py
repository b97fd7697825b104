"""The training backend `ddp` of rlframework."""

__version__ = "0.1.0"

"""Checkpoints in object storage, or in any file system that fsspec opens: send, fetch, and send in the background."""

__version__ = "0.2.0"

"""Estimates of memory, disk and tokens, made from a run's configuration before workers start."""

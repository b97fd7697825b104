"""Estimates before a run: a worker's memory, disk and tokens, also for GPUs that this machine does not have."""

"""What a run will need of memory, disk and tokens, reckoned from its configuration before a worker starts."""

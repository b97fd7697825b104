"""Names of NeMo-RL that are not those of the rooms that do the work."""

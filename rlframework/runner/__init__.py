"""From a configuration to a finished run: launch, estimates before the start, restarts; convert and tokenize."""

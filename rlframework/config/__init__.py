"""The configuration: pydantic models, and the loader that makes one run's configuration out of YAML and overrides."""

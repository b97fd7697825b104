"""The configuration of a run: its pydantic models, and the loader that merges YAML files and overrides into them."""

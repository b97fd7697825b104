"""The evaluate and generate commands: prompting a model, the report with its statistics."""

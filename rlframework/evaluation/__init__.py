"""The evaluate and generate commands: prompting a model, statistics, and the report of an evaluation."""

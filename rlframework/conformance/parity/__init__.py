"""Parity: the same model, batches and steps on each backend, beside the oracle, in figures.

`exam` says what is computed and what the oracle finds, `compare` puts a backend beside it, `update` compares what steps
did to the weights, `divergence` finds where the two first part, `recorded` and `replay` do it for a recorded step of a
real run, `report` prints, `command` is the command line's. Importing this package imports no torch.
"""

"""Parity: compare every backend with the oracle on the same model, batches and steps.

`scenario` defines what is computed and the oracle's results, `compare` runs a backend on it and finds where the two
first differ, by the measure of `update`; `recorded_step` makes a scenario of a recorded step of a real run, `report`
prints, and `command` implements `rlframework parity`. Importing this package imports no torch.
"""

"""Parity: compare every backend with the oracle on the same model, batches and steps.

`scenario` defines what is computed and the oracle's results, `compare` runs a backend on it, `measurements` and
`update` measure the differences, `divergence` finds where the two first differ, `recorded_step` and `replay` do the
same for a recorded step of a real run, `report` prints, and `command` implements `rlframework parity`. Importing this
package imports no torch.
"""

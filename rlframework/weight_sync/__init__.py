"""Refit: transfer the trainer's weights to generation engines in other processes, bit for bit.

`ipc` and `collective` are the two transports, `receiver.ReceivesWeights` is the engine's side,
`coordinator.Refitter` the driver's, and `rlframework.policy.weight_sender` the trainer's. Not supported: several
trainer ranks sending in parallel, and quantised weights.
"""

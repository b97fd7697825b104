"""Refit: transfer the trainer's weights to generation engines in other processes, bit for bit.

Two transports, the same for every backend, built on `Engine.weight_specs` and `Engine.gather_weights`:

- IPC (`ipc`): memory shared by processes on one machine or one GPU, either the engine's own or the trainer's;
- collective (`collective`): broadcasts in a process group of trainer rank 0 and the receivers (gloo or NCCL).

`receiver.ReceivesWeights` is the engine's side, `coordinator.Refitter` the driver's; the trainer's is
`rlframework.policy.weight_sender`. Not supported: several trainer ranks sending in parallel, and quantised weights.
"""

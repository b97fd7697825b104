"""Code that all training backends share: training step, head, checkpoints, weight sender, and the driver's handle."""

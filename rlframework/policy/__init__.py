"""What all training backends share: the step, the head, the refit transports, checkpoints, and the driver's handle."""

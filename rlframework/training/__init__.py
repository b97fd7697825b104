"""The training loop that algorithms share: steps, validation, checkpoints, recording, profiling."""

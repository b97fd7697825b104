"""Checkpoints on disk: portable (whole tensors), sharded (torch DCP), native (the engine's own), adapters."""

"""Broken data processors: each changes the input or the output of the sound one."""

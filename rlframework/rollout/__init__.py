"""Rollouts: from prompts, through generation and the environment, to training rows."""

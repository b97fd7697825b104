"""Rollouts: completions and episodes as training rows with rewards."""

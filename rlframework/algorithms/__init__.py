"""Algorithms: losses, advantages, rollouts, and one short file an algorithm."""

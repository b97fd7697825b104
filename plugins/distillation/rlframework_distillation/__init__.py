"""Distillation of a teacher into the policy."""

__version__ = "0.2.0"

"""Errors, files, messages and secrets, for every room."""

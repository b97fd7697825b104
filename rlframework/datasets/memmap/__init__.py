"""Tensor classes in memory-mapped folders: written whole or not at all, checked before they are mapped."""

"""Tensorclasses in memory-mapped folders: written atomically, and checked before they are mapped."""

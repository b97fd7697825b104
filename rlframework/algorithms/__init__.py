"""Algorithms, one short file each, with their losses and advantages."""

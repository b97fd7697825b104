"""The contracts between the core and its plugins, one abstract class or protocol per file.

The docstrings are the specification.
"""

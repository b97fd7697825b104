"""The contracts: one abstract class or protocol a file. The docstrings are the specification."""

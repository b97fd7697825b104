"""The Megatron-core training backend of rlframework. This release only registers its name: the worker comes later."""

__version__ = "0.1.0"

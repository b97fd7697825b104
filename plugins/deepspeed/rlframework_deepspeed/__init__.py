"""The DeepSpeed training backend of rlframework: ZeRO 0 to 3 and AutoTP."""

__version__ = "0.2.0"

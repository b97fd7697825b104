"""The Megatron-core training backend of rlframework: GPT models of megatron-core from Hugging Face directories."""

__version__ = "0.2.0"

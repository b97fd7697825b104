"""The reference training backend of rlframework: FSDP2 over DTensor, for any causal LM of Hugging Face transformers."""

__version__ = "0.2.0"

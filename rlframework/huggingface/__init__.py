"""Names on the Hugging Face hub and directories in its format: tokenizers, model sizes, random test models."""

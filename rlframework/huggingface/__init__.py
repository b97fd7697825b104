"""The Hugging Face hub and its formats: model names, tokenizers, model sizes, random test models."""

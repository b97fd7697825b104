"""Data on its way to the model: tokenizers, chat templates, files, loaders, microbatches."""

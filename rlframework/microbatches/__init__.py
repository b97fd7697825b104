"""From rows to microbatches: global batches and their counts, model inputs, and NeMo-RL's functions for both."""

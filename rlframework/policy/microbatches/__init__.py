"""From rows to microbatches: the data processor, global batches and their counts, model inputs."""

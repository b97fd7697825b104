"""The output head: log-probabilities, entropies, top-k tokens, logits or scores inside a model's forward."""

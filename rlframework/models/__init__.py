"""transformers models as the training engines use them. Imported only by plugins, in their worker processes."""

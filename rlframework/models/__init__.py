"""Models of transformers as training engines share them. Imported by plugins, and in their worker processes only."""

"""Conversations as a model reads and writes them: chat templates, their tokens, and the tool calls in replies."""

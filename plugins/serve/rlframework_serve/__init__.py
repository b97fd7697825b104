"""The agent endpoint: an OpenAI-compatible HTTP server in front of the generation client."""

__version__ = "0.2.0"

"""Environments whose tasks come from elsewhere: Gymnasium, MCP servers, OpenEnv, verifiers, reasoning-gym."""

__version__ = "0.2.0"

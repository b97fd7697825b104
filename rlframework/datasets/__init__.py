"""Data sets: sources of rows, conversations, chat templates, token data, preference and reward data."""

"""Data sets: reading rows, conversations, chat templates, token data, preference and reward data."""

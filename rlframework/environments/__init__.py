"""Tasks whose answers can be checked: made from a seed (addition) or read from data (GSM8K, and your own)."""

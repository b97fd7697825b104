"""Tasks with checkable answers: generated from a seed (addition), or read from data (GSM8K, your own)."""

"""Data sets as rows that are read when asked for: JSON lines, Parquet, Arrow, names on the hub (`opening`)."""

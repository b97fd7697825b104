"""Sources of rows that are read on access: JSON lines, Parquet, Arrow, and data sets on the hub (`opening`)."""

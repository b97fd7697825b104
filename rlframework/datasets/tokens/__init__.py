"""Data sets rendered once to token ids on disk: `writing` writes the folder, `reading` memory-maps it."""

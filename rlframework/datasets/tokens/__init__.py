"""Data sets rendered once into token ids on disk, memory-mapped: `writing` makes the folder, `reading` maps it."""

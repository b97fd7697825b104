"""Discovery and selection of plugins: hookspecs, the records that plugins return, and the manager."""

"""Worker groups on Ray: actors, virtual clusters, and batches through the object store without copies."""

__version__ = "0.2.0"

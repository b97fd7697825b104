"""Worker groups on Ray: actors, virtual clusters, and batches through the object store without copies."""

"""Batches, process meshes and worker groups: how rows and calls get to the workers, and results back."""

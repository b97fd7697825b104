"""Observers of a run, which never influence it: console, JSONL, TensorBoard, W&B, MLflow, training curves, reports."""

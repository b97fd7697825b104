"""The HTML report and figures of runs, and observers that report to TensorBoard, W&B, MLflow and Trackio."""

__version__ = "0.2.0"

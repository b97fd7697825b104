"""Everything that only listens to a run: console, JSONL, TensorBoard, the curve's picture, and plugins' observers."""

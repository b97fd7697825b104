"""Generation inside the trainer's process: the transformers engine, and the driver's handle on the workers' engines."""

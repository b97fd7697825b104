"""Generation: the transformers engine, generation workers, and the driver's handles on them."""

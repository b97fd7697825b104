"""Batches of rows: `BatchedDataDict`, sharding over ranks, packing, and moving rows between processes."""

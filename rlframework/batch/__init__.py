"""Batches of rows: `BatchedDataDict`, sharding over ranks, packing, and transfer between processes."""

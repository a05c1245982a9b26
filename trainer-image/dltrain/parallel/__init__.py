"""Data, pipeline and tensor parallelism, and the sharded optimizer."""

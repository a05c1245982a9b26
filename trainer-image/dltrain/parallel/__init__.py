"""Data parallelism and the sharded optimizer; pipeline and tensor parallelism in ``model_split``."""

"""Data parallelism and the sharded optimizer; model parallelism in ``model_split``; PyTorch's own in ``pytorch``."""

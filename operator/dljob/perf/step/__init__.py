"""How long a training step takes: compute, communication, synchronization and input data."""

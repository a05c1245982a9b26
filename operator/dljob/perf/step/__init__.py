"""Model of the training step time: compute, communication, synchronization and input data."""

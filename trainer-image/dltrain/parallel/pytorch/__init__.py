"""PyTorch's own implementations of parallelism, with the weights that unequal local batches need."""

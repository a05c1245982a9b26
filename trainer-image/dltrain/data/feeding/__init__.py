"""Loading and prefetching of batches: the loader, its worker processes, and the copy to the device."""

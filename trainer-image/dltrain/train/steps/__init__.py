"""One step of synchronous training: its batches, the values that ranks exchange, and the update."""

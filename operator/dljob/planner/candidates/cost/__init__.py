"""The predicted cost of candidates: speed of ranks, step time and memory, from measurements or from the model."""

"""The ranks that train together, their local batch sizes (shares), and how they continue after a loss of ranks."""

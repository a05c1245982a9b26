"""What could run: device pools, options, splits, and the predicted cost of each candidate."""

"""Candidates for a plan: device pools, options, batch splits, and the predicted cost of each candidate."""

"""The ranks that train together, their shares, and how they continue after a loss."""

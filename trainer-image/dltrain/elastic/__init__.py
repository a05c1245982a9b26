"""The ranks that train together, their shares, and what happens when one dies."""

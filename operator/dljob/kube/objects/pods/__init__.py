"""Reduce pods: evictions, rejections by nodes, and pods that look at data."""

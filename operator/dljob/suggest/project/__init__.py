"""Render the project that the user keeps: scripts, manifest and README."""

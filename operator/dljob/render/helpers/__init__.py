"""Manifests of pods that run no ranks: one that looks at data, and one that measures hardware."""

"""Asynchronous and stale-synchronous training with a parameter server: ``training`` begins it."""

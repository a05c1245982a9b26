"""Asynchronous and stale-synchronous training with a parameter server, which ``training`` starts."""

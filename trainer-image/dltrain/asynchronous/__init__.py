"""Asynchronous and stale-synchronous training with a parameter server. The module ``training`` starts both."""

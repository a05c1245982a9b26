"""Shared parts of the collectives: the interface, waiting, polling, fault tolerance, shared memory."""

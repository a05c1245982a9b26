"""Decide when a job may hold devices: if all its pods can run and, in a queue of Kueue, once Kueue has admitted it."""

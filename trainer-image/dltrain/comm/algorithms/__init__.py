"""Collectives that are no schedule of messages, and the two halves of an all-reduce."""

"""Collectives that do not use a schedule of messages, and the two halves of an all-reduce."""

"""Pods that a command starts and deletes again: one that reads a volume, and those that measure nodes."""

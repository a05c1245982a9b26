"""Checkpoints in an object store (S3): access to objects, the log of complete checkpoints, and staged folders."""

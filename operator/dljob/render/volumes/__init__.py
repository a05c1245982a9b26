"""Volumes of a pod and the init containers that fill them: dataset, script files, scratch space, checkpoints in S3."""

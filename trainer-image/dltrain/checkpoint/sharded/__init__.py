"""Sharded checkpoints: every rank writes its own part of the state, by torch.distributed.checkpoint."""

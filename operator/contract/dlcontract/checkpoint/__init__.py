"""The format of checkpoints, as far as both the trainer and the command line read it."""

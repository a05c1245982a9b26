"""The format of checkpoints, which the command line reads, too, and their interval, with which the planner predicts."""

"""The record of a run: the ledger of progress updates, and the run report beside the checkpoints."""

"""What is known of a run: the ledger, and the report beside the checkpoints."""

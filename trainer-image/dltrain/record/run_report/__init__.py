"""The report of a run, as JSON and as a page with plots, beside the checkpoints."""

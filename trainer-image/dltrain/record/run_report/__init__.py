"""The run report beside the checkpoints: a JSON file, and an HTML page with plots."""

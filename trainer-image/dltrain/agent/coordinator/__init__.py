"""The agent that leads its job: it launches the ranks, watches, restarts and reports."""

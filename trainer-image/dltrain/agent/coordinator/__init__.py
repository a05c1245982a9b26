"""The coordinator, an agent that launches, watches and restarts the ranks of its job, and reports."""

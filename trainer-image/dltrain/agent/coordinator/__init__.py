"""The coordinator: the agent that launches, watches and restarts all ranks of a job, and reports to the operator."""

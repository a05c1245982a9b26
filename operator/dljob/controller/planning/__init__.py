"""Plan jobs in the background: whose turn it is, what it may use, and the process that makes the plans."""

"""An agent as a member of its job: it runs this pod's ranks."""

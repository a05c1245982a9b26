"""Messages among ranks and agents, the layout of the checkpoint volume, and the errors that end a run."""

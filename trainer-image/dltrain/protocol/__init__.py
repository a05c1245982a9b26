"""Messages between ranks and agents, the layout of the volume, and the errors that end a run."""

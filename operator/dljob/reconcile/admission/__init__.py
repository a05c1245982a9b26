"""When a job may hold devices: all pods or none, and after Kueue has admitted it."""

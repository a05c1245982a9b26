"""Hardware probes: which device types to measure, and how their results become the planner's constants."""

"""Hardware probes: which device classes to measure, and how their results become the planner's constants."""

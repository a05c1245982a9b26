"""The performance model: how long a step takes, what it needs and what it costs. White box, pure, SI units."""

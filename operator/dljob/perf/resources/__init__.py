"""Memory, energy and power of a step."""

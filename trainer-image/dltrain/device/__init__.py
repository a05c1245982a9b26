"""The device of a rank: selection, energy, random generators."""

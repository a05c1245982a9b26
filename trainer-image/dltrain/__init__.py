"""dltrain: the trainer. Ranks, agents, collectives, checkpoints; the five-line API for user scripts."""

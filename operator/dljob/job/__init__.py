"""Translate a DLJob into a planner request, and the planner's decision into the status and the trainer's plan."""

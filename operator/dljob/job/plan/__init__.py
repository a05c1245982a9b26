"""A job's plan in its four forms: the planner's request, status.plan, the stored plan, and the trainer's plan."""

"""From a DLJob to a question for the planner, and from its answer to status and to the plan for the trainer."""

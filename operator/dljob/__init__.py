"""dljob: the operator, the command line and the planner of DLJobs."""

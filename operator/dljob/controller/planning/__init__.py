"""Plan jobs in the background: choose the next job and the devices that it may use, and run the planner process."""

"""Describe one DLJob: its observed state, plan, reservations, measured profiles and remaining time.

The package ``plan`` translates the job's spec into a request to the planner. It also translates the planner's decision
into ``status.plan`` and into the plan that the trainer reads.
"""

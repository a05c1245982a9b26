"""Reasons for which a job may not hold devices yet: priority class, quota, new nodes, preemption, queues of Kueue."""

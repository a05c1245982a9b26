"""The main loop of the operator. Only this package uses kopf.

Watches add the keys of changed jobs to a work queue. Workers take keys from the queue and reconcile the jobs.
"""

"""The main loop: watches feed a work queue, and workers reconcile one job at a time. Only this package uses kopf."""

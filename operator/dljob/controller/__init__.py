"""The main loop: watches feed a work queue, and workers reconcile one job at a time. The only user of kopf."""

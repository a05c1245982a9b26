"""What every collective needs: the interface, waiting, polling, fault tolerance, shared memory."""

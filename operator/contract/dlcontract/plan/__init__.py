"""The plan of a job, the short form of its ranks, and what agents of earlier releases reject in it."""

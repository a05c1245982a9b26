"""Collectives that are schedules of messages, and the engine that runs them over MPI."""

"""Batches of the steps to come, made while a step computes. Users: ``loader``, ``loop``, ``apart``."""

"""Forecasts: when the waiting jobs of a queue will start and end."""

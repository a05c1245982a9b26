"""Curves and constants from measured points."""

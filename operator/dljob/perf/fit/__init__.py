"""Curves and constants, fitted to measured points."""

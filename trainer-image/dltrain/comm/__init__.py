"""Collectives: one interface (``core.collective``), several algorithms, chosen by name (``selection``)."""

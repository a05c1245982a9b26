"""Collectives: one interface (``core.collective``) for several algorithms, which ``selection`` chooses by name."""

"""Collectives: one interface (``base``), several strategies, chosen by name (``choose``)."""

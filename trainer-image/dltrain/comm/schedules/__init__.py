"""Collectives that consist of point-to-point messages in a fixed order (a schedule), and the engine that sends them."""

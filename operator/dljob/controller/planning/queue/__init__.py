"""Parts of the queue: shadow reservations, and what jobs hold."""

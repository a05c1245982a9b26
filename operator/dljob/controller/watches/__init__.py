"""Update the cache from watches of the API server, and queue the jobs that a change affects."""

from dljob.controller.watches.watches import LABELLED, REFLECTED, WATCHED, Watches

__all__ = ["LABELLED", "REFLECTED", "WATCHED", "Watches"]
